"""Tables of measured launch geometry, one file per op and GPU: data only, made by `benchmarks.tune`, read once each."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from services.worker.kernels.gpu_arch import arch_of

Row = Mapping[str, Any]
FOLDER = Path(__file__).parent


def table(op: str, device: torch.device) -> tuple[Row, ...]:
    """The rows for this op on this GPU; none where nobody has tuned it."""
    return read(op, arch_of(device))


@cache
def read(op: str, name: str, folder: Path = FOLDER) -> tuple[Row, ...]:
    """The rows of `<op>.<name>.json`: {"made": how, "rows": [...]}."""
    path = folder / f"{op}.{name}.json"
    if not name or not path.is_file():
        return ()
    return tuple(json.loads(path.read_text())["rows"])


def write(op: str, name: str, made: str, rows: list[dict[str, Any]], folder: Path = FOLDER) -> Path:
    """One row a line, so that a new measurement is a readable difference. Returns the file's path."""
    path = folder / f"{op}.{name}.json"
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{"made": {json.dumps(made)}, "rows": [\n{lines}\n]}}\n')
    read.cache_clear()
    return path

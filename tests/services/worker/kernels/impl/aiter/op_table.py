"""Which provider each op would be bound to on an AMD GPU, per model, architecture and release of AITER.

Nothing is run: AITER's signatures are those of signatures.json (see fake.py), Triton's kernels are there anyway. So the
table says what is chosen by shape, architecture and signature; the self-test at start may still drop a choice.
`python -m tests.services.worker.kernels.impl.aiter.op_table --write docs/rocm.md`.
"""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.models import SHAPES, config_of
from services.worker.kernels.registry import Bindings, Facts, bind, find_impls
from services.worker.model_engine import facts_of
from services.worker.models import registry
from services.worker.models.spec import Config
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, install

MODELS = ("0.6b", "8b", "30b-a3b")
ARCHES = ("gfx942", "gfx950")
BEGIN = "<!-- python -m tests.services.worker.kernels.impl.aiter.op_table --write docs/rocm.md -->"
END = "<!-- end of the op table -->"
PRIORITY = ("aiter", "triton", "torch")


def facts(model: str, arch: str) -> Facts:
    config = config_of(SHAPES[model])
    _, definition = registry.find_model(config["architectures"])
    spec = definition.read(Config(config))
    found = facts_of(torch.device("cpu"), torch.bfloat16, spec, 16, torch.bfloat16)
    return Facts("cuda", arch, found.dtype, found.shapes)


def bound(model: str, arch: str, release: str) -> Bindings:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, release, arch)
        return bind(PRIORITY, facts(model, arch), finder=find_impls)


def table() -> str:
    """Markdown: ops by model and architecture; the older release behind a slash where it differs."""
    columns = [(model, arch) for model in MODELS for arch in ARCHES]
    found = {(column, release): bound(*column, release) for column in columns for release in (NEW, OLD)}
    ops = [row.op for row in found[columns[0], NEW].table]
    lines = [
        "| op | " + " | ".join(f"{model}, {arch}" for model, arch in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]

    def cell(op: str, column: tuple[str, str]) -> str:
        both = [next(row.provider for row in found[column, release].table if row.op == op) for release in (NEW, OLD)]
        return " / ".join(dict.fromkeys(both))

    for op in ops:
        cells = [cell(op, column) for column in columns]
        if "aiter" in " ".join(cells):
            lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    rest = sorted(op for op in ops if not any("aiter" in cell(op, column) for column in columns))
    layouts = [" / ".join(dict.fromkeys(found[column, release].layout for release in (NEW, OLD))) for column in columns]
    lines.append("| KV pages | " + " | ".join(layouts) + " |")
    lines += ["", "By Triton or torch everywhere: " + ", ".join(f"`{op}`" for op in rest) + "."]
    return "\n".join(lines)


def written(document: str) -> str:
    """The document with the present table between its marks."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="document with the marks")
    path: Path | None = parser.parse_args().write
    if path is None:
        print(table())
    else:
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()

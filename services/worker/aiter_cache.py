"""Where AITER keeps what it builds: all of its caches in one folder per content of what a build depends on.

Owner: the engine at start, before AITER is imported; `valence doctor` looks, and builds ahead. AITER has four caches of
its own (modules, template ops, FlyDSL, and Triton's, which compile_cache.py has), and two habits that need help: with a
folder set it no longer finds the modules that its wheel brings, so these are linked into it; and it merges its tables
of tuned shapes in a shared /tmp, under a lock, rewriting its own files where two say different. Ours are merged once
here.
"""

import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from services.worker.kernels import known_bad

log = logging.getLogger("worker")

DISTRIBUTIONS = ("amd-aiter", "aiter")
ROCM = Path("/opt/rocm")
TABLES = {  # AITER's variable: the name of its table
    "AITER_CONFIG_GEMM_A4W4": "a4w4_blockscale_tuned_gemm",
    "AITER_CONFIG_GEMM_A8W8": "a8w8_tuned_gemm",
    "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE": "a8w8_bpreshuffle_tuned_gemm",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE": "a8w8_blockscale_tuned_gemm",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE": "a8w8_blockscale_bpreshuffle_tuned_gemm",
    "AITER_CONFIG_FMOE": "tuned_fmoe",
    "AITER_CONFIG_A8W8_BATCHED_GEMM": "a8w8_tuned_batched_gemm",
    "AITER_CONFIG_BF16_BATCHED_GEMM": "bf16_tuned_batched_gemm",
    "AITER_CONFIG_GEMM_BF16": "bf16_tuned_gemm",
}
UNITS_OF = {"256": "gfx950", "80": "gfx942", "304": "gfx942"}  # what AITER takes tables without an architecture for
Row = dict[str, str]


def aiter_version() -> str:
    """Of the installed distribution; empty if there is none."""
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def aiter_package() -> Path | None:
    """The folder of the package, found without running its code."""
    spec = importlib.util.find_spec("aiter")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def rocm_version(root: Path = ROCM) -> str:
    """As the installation says, like 7.2.0; empty where there is none."""
    with suppress(OSError):
        return (root / ".info" / "version").read_text().strip().partition("-")[0]
    return ""


def depends_on(arch: str) -> dict[str, str]:
    """Everything that what AITER builds depends on."""
    record = ""
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            record = record or importlib.metadata.distribution(name).read_text("RECORD") or ""
    return {
        "arch": arch,
        "aiter": aiter_version(),
        "files": hashlib.sha256(record.encode()).hexdigest()[:16],
        "torch": importlib.metadata.version("torch"),
        "rocm": rocm_version(),
        "python": f"{sys.implementation.name} {platform.python_version()}",
        "system": f"{platform.machine()} {' '.join(platform.libc_ver())}",
    }


class AiterCache:
    """`folder` is of this content only; `environment` are the variables that lead AITER there."""

    def __init__(self, root: Path, arch: str) -> None:
        """Raises OSError where the folder cannot be made or others can put code there."""
        self.content = depends_on(arch)
        digest = hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / "aiter" / f"{arch}-{digest}"
        self._arch = arch

    def prepare(self) -> None:
        """Folders that only this user can write, the wheel's modules, merged tables."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("jit", "root", "flydsl", "tables"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        found = self.folder.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            raise PermissionError(1, f"others can put code into {self.folder}")
        (self.folder / "content.json").write_text(json.dumps(self.content, indent=1))
        if (package := aiter_package()) is not None:
            link_modules(package / "jit", self.folder / "jit")
            merge_tables(package / "configs", self.folder / "tables")

    @property
    def environment(self) -> dict[str, str]:
        """Also the switches without which AITER is known to fail on this architecture."""
        tables = {name: self.folder / "tables" / f"{table}.csv" for name, table in TABLES.items()}
        return {
            "AITER_JIT_DIR": str(self.folder / "jit"),
            "AITER_ROOT_DIR": str(self.folder / "root"),
            "FLYDSL_RUNTIME_CACHE_DIR": str(self.folder / "flydsl"),
            **{name: str(path) for name, path in tables.items() if path.is_file()},
            **known_bad.switches(self._arch),
        }


def link_modules(source: Path, target: Path) -> int:
    """Modules that the wheel brings, where AITER looks for them once a folder is set; returns how many are new.

    What was built here stays, and AITER replaces a link that is of another architecture by its own build.
    """
    count = 0
    for path in sorted(source.glob("*.so")):
        place = target / path.name
        if place.is_symlink() and not place.exists():
            place.unlink(missing_ok=True)
        with suppress(FileExistsError):
            place.symlink_to(path)
            count += 1
    return count


def merge_tables(configs: Path, target: Path) -> None:
    """One file per table that has parts for single models, the fastest row of each shape; like AITER's own merge."""
    for name in TABLES.values():
        general, place = configs / f"{name}.csv", target / f"{name}.csv"
        parts = sorted(p for p in (configs / "model_configs").glob(f"*{name}*.csv") if "untuned" not in p.name)
        if place.is_file() or not general.is_file() or not parts:
            continue
        untuned = configs / f"{name.replace('tuned', 'untuned')}.csv"
        keys = next(csv.reader(untuned.read_text().splitlines()), []) if untuned.is_file() else []
        if not keys:
            continue  # nobody knows what makes two rows the same
        columns, rows = merged([list(read_rows(path)) for path in (general, *parts)], keys)
        draft = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        with draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        draft.replace(place)


def read_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def merged(parts: list[list[Row]], keys: list[str]) -> tuple[list[str], list[Row]]:
    """Columns and rows of all parts; of rows with the same `keys`, GPU and tag the one that takes least time."""
    columns: list[str] = []
    for rows in parts:
        for column in rows[0] if rows else ():
            if column not in columns:
                columns.insert(columns.index("tflops") if columns and "tflops" in columns else len(columns), column)
    whole = [_completed(row, columns) for rows in parts for row in rows]
    same = [name for name in (*keys, "cu_num", "gfx", "_tag") if name in columns]
    best: dict[tuple[str, ...], Row] = {}
    for row in whole:
        key = tuple(row[name] for name in same)
        if key not in best or _time(row) < _time(best[key]):
            best[key] = row
    return columns, list(best.values())


def _completed(row: Mapping[str, str], columns: list[str]) -> Row:
    missing = {name: "" if name == "_tag" else "0" for name in columns if row.get(name) is None}
    if "gfx" in missing:
        missing["gfx"] = UNITS_OF.get(row.get("cu_num", ""), "0")
    return {name: missing.get(name, row.get(name) or "") for name in columns}


def _time(row: Mapping[str, str]) -> float:
    try:
        return float(row.get("us", ""))
    except ValueError:
        return float("inf")

"""Measures launch geometry on this GPU and writes the tables that kernels choose by (services/worker/kernels/tuned).

Sections are the files tune_*.py. Needs torch, Triton and rich only.

    python -m benchmarks.tune [--op norm_linear --op add_linear] [--missing] [--budget SECONDS] [--out FOLDER]
    python -m benchmarks.tune --op layer [--rows 16,64]
"""

import argparse
import gc
import importlib
import json
import os
import pkgutil
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.tuning import Bench, Section, Tuned, seconds
from services.worker.kernels import tuned
from services.worker.kernels.gpu_arch import arch_of

FIGURES = {"us": "{:.2f}", "floor": "{:.0%}", "torch": "{:.2f}x"}
H200_READ = 4.27e12  # bytes per second, measured


def sections() -> list[Section]:
    found = []
    for entry in pkgutil.iter_modules(benchmarks.__path__):
        if entry.name.startswith("tune_"):
            section = importlib.import_module(f"benchmarks.{entry.name}").SECTION
            assert isinstance(section, Section)
            found.append(section)
    return sorted(found, key=lambda section: section.last)


def read_bandwidth() -> float:
    """Bytes per second of a sum over 2 GB, for GPUs whose figure is not known here."""
    numbers = torch.ones(1 << 29, device="cuda")
    return numbers.nbytes / seconds([numbers.sum])


def show(console: Console, result: Tuned) -> None:
    names = list(dict.fromkeys(name for row in result.rows for name in row))
    table = Table(title=result.op)
    for name in names:
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(*(FIGURES.get(name, "{}").format(row[name]) if name in row else "" for name in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", action="append", default=[], help="tune only this op; may be repeated")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds; the rest keeps the rule's choice")
    parser.add_argument("--rows", default="1", help="of the steps whose chains --op layer tunes: 1,4,16,32,64")
    parser.add_argument("--missing", action="store_true", help="only what the tables do not hold yet")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=max(1, cores - 2), help="processes that compile")
    parser.add_argument("--out", type=Path, default=tuned.FOLDER, help="folder for the tables")
    parser.add_argument("--json", help="all rows in one file")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    bandwidth = H200_READ if "H200" in name else read_bandwidth()
    start = time.monotonic()
    gc.freeze()  # each capture of a graph collects garbage
    rows = tuple(int(count) for count in options.rows.split(","))
    bench = Bench(
        device, start + options.budget, bandwidth, options.workers, frozenset(options.op), options.missing, rows
    )
    made = f"{name}, torch {torch.__version__}, python -m benchmarks.tune, {time.strftime('%Y-%m-%d')}"
    console = Console(width=160, highlight=False)
    results: list[Tuned] = []
    for section in sections():
        if not any(bench.wants(op) for op in section.ops):
            continue
        for result in section.run(bench):
            results.append(result)
            path = tuned.write(result.op, arch_of(device), made, result.rows, options.out)
            show(console, result)
            console.print(f"{path}  ({time.monotonic() - start:.0f} s)")
    if options.json:
        Path(options.json).write_text(json.dumps({result.op: result.rows for result in results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

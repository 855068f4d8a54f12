"""Kernels against their floors on a GPU; what they use of GPUs that are not there, on any host.

`python -m benchmarks.kernels --compile-only gfx942,gfx950,sm_90 [--json OUT]` compiles ahead of time and prints
registers, spills, LDS, matrix instructions and size of every kernel. The table in the repository is renewed by naming
it: services/worker/kernels/impl/triton/resources.json.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import aot


def compile_only(targets: Sequence[str], only: str, json_path: str | None) -> int:
    """Exit status 1 if a kernel of the decode step spills or one does not fit."""
    if unknown := set(targets) - set(aot.TARGETS):
        raise SystemExit(f"unknown target {min(unknown)!r}; known: {', '.join(aot.TARGETS)}")
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("compiling")
        todo = aot.tasks(targets, only)
        reports = aot.compile_all(
            todo, os.cpu_count() or 1, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    table = Table(title=f"Compiled by Triton {aot.triton.__version__}, per thread")
    for column in ("kernel", "target"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spilled", "LDS bytes", "matrix", "binary bytes"):
        table.add_column(column, justify="right")
    for report in reports:
        spilled = f"[red]{report.spilled}[/]" if report.spilled else "-"
        figures = (str(report.registers), spilled, f"{report.lds_bytes:,}", str(report.matrix_instructions))
        table.add_row(report.kernel, report.target, *figures, f"{report.binary_bytes:,}")
    console.print(table)
    if json_path is not None:
        Path(json_path).write_text(aot.table_text(reports))
    found = list(aot.violations(reports))
    for text in found:
        console.print(text, style="bold red", markup=False)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--compile-only", metavar="TARGETS", help=f"of {','.join(aot.TARGETS)}; needs no GPU")
    parser.add_argument("--only", default="", metavar="WORD", help="kernels whose file's name has it")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if options.compile_only:
        return compile_only(options.compile_only.split(","), options.only, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Kernels against their floors on a GPU; what they use of GPUs that are not there, on any host.

`python -m benchmarks.kernels [--json OUT] [--plot OUT.png] [--only WORD] [--compile]` first holds the Triton kernels
against their ops' meanings and ends there, without a figure, if one is wrong. Then it times each in the shapes of the
three models, next to its floor on this device and to torch's best way, and adds up a decode step. With `--narrow` it
does so with those of weights of 8 and 4 bits instead of bf16's.

`python -m benchmarks.kernels --compile-only gfx942,gfx950,sm_90 [--json OUT]` compiles ahead of time and prints
registers, spills, LDS, matrix instructions and size of every kernel. The table in the repository is renewed by naming
it: services/worker/kernels/impl/triton/resources.json. With `--only WORD` the other files' rows stay. `--changed` takes
from that table what still is of its source, and compiles the rest.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import aot, kernel_work, narrow_work
from benchmarks.kernel_time import Ceilings, Row, ceilings, gate_and_warm, impls, measure
from benchmarks.shapes import DECODE_BATCHES, MODELS, PREFILL_TOKENS, ModelShape

WIDTH = 120  # of tables in a file or a pipe
COMPILED = ("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "norm_linear")  # where torch.compile may help


def make_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def compile_only(targets: Sequence[str], only: str, quick: bool, json_path: str | None, changed: bool = False) -> int:
    """Exit status 1 if a kernel does not compile or fit, or one of the decode step spills."""
    if unknown := set(targets) - set(aot.TARGETS):
        raise SystemExit(f"unknown target {min(unknown)!r}; known: {', '.join(aot.TARGETS)}")
    console = make_console()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("compiling")
        todo = aot.tasks(targets, only, quick)
        kept, compiled = aot.unchanged(todo) if changed else ([], todo)
        cores = len(os.sched_getaffinity(0))
        reports, failures = aot.compile_all(
            compiled, cores, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    table = Table(title=f"Compiled by Triton {triton.__version__}, per thread")
    for column in ("kernel", "target"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spilled", "LDS bytes", "matrix", "bytes"):
        table.add_column(column, justify="right")
    for report in reports:
        spilled = f"[red]{report.spilled}[/]" if report.spilled else "-"
        figures = (str(report.registers), spilled, f"{report.lds_bytes:,}", str(report.matrix_instructions))
        table.add_row(report.kernel, report.target, *figures, f"{report.binary_bytes:,}")
    console.print(table)
    reports = sorted([*reports, *kept], key=lambda report: (report.kernel, report.target))
    if json_path is not None and not failures:
        aot.write(Path(json_path), reports, todo, only)
    found = [*failures, *aot.violations(reports)]
    for text in found:
        console.print(text, style="bold red", markup=False)
    return 1 if found else 0


class Step(NamedTuple):
    """A decode step's kernels added up: what a model takes if nothing lies between them, in milliseconds."""

    model: str
    tokens: int
    ms: float
    floor_ms: float
    torch_ms: float
    missing: str  # ops of the step that have no Triton implementation here


def steps(rows: Sequence[Row], models: Sequence[ModelShape], sizes: Sequence[int]) -> list[Step]:
    found = []
    for model in models:
        for tokens in sizes:
            parts = [row for row in rows if row.per_step and (row.model, row.tokens) == (model.name, tokens)]
            wanted = {work.op for work in kernel_work.works(model, tokens) if work.per_step}
            ms = sum(row.us * row.per_step for row in parts) / 1e3
            floor_ms = sum(row.floor_us * row.per_step for row in parts) / 1e3
            torch_ms = sum((row.torch_us or 0.0) * row.per_step for row in parts) / 1e3
            missing = ", ".join(sorted(wanted - {row.op for row in parts}))
            found.append(Step(model.name, tokens, ms, floor_ms, torch_ms, missing))
    return found


def show(console: Console, rows: Sequence[Row], totals: Sequence[Step], conditions: str) -> None:
    table = Table(title="Kernels, microseconds per call")
    for column in ("op", "model"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "time", "floor", "% of floor", "", "torch", "torch / ours"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = "-" if row.torch_us is None else f"{row.torch_us / row.us:.2f}"
        best = row.torch_how if row.torch_us is None else f"{row.torch_us:,.1f}"
        figures = (str(row.tokens), f"{row.us:,.1f}", f"{row.floor_us:,.1f}", f"{row.percent:.0f}", row.bound, best)
        table.add_row(f"{row.op} {row.label}".strip(), row.model, *figures, ratio)
    console.print(table)
    table = Table(title="A decode step's kernels added up, milliseconds")
    for column in ("model", "rows", "time", "floor", "% of floor", "torch", "without"):
        table.add_column(column, justify="left" if column in ("model", "without") else "right")
    for step in totals:
        times = (f"{step.ms:.3f}", f"{step.floor_ms:.3f}", f"{100 * step.floor_ms / (step.ms or 1):.0f}")
        table.add_row(step.model, str(step.tokens), *times, f"{step.torch_ms:.3f}", step.missing)
    console.print(table)
    console.print(conditions, style="dim", markup=False)


def plot(path: str, rows: Sequence[Row], conditions: str) -> None:
    """A bar per op and size: the floor as a share of the time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib") from None
    models = list(dict.fromkeys(row.model for row in rows))
    sizes = sorted({row.tokens for row in rows})
    figure = Figure(figsize=(16, 5 * len(models)), layout="constrained")
    figure.suptitle(conditions, fontsize=8)
    for axis, model in zip(figure.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
        labels = list(dict.fromkeys(f"{row.op}\n{row.label}" for row in rows if row.model == model))
        for place, tokens in enumerate(sizes):
            shown = [row for row in rows if (row.model, row.tokens) == (model, tokens)]
            at = [labels.index(f"{row.op}\n{row.label}") + (place - len(sizes) / 2) * 0.8 / len(sizes) for row in shown]
            heights = [row.percent for row in shown]
            axis.bar(at, heights, 0.8 / len(sizes), align="edge", label=f"{tokens} tokens")
        axis.set_xticks(range(len(labels)), labels, fontsize=6)
        axis.margins(x=0.01)  # the width is for the names
        axis.set(title=model, ylabel="% of floor", ylim=(0, 110))
        axis.axhline(100, color="black", linewidth=0.5)
        axis.legend(fontsize=7, ncols=len(sizes))
    figure.savefig(path, dpi=110)


def describe(limit: Ceilings) -> str:
    name = torch.cuda.get_device_name()
    return (
        f"{name}, torch {torch.__version__}, triton {triton.__version__}; bf16; graph replay over rotating arguments; "
        f"ceilings measured here: {limit.bytes_per_s / 1e12:.2f} TB/s, {limit.flops_per_s / 1e12:.0f} TFLOP/s"
    )


def on_gpu(options: argparse.Namespace) -> int:
    console = make_console()
    models = [model for model in MODELS if options.model.lower() in model.name.lower()]
    sizes = [int(size) for size in options.tokens.split(",")]
    ours = impls()
    works = narrow_work.works if options.narrow else kernel_work.works
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("correctness, and compiling")
        wrong = gate_and_warm(
            works, options.only, models, sizes, lambda done, total: progress.update(bar, completed=done, total=total)
        )
        if wrong:
            for text in wrong:
                console.print(text, style="bold red", markup=False)
            return 1
        limit = ceilings()
        todo = [
            work
            for model in models
            for tokens in sizes
            for work in works(model, tokens)
            if work.op in ours and options.only in work.op
        ]
        bar = progress.add_task("measuring", total=len(todo))
        gc.freeze()  # each capture collects garbage, and all that lives here stays
        rows = []
        for work in todo:
            rows.append(measure(work, ours[work.op].run, limit, options.compile and work.op in COMPILED))
            progress.advance(bar)
    rows.sort(key=lambda row: (row.op, row.label, [model.name for model in models].index(row.model), row.tokens))
    totals = [] if options.narrow else steps(rows, models, [size for size in sizes if size in DECODE_BATCHES])
    show(console, rows, totals, describe(limit))
    if options.json is not None:
        content = {
            "conditions": describe(limit),
            "rows": [r._asdict() for r in rows],
            "steps": [s._asdict() for s in totals],
        }
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    if options.plot is not None:
        plot(options.plot, rows, describe(limit))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--compile-only", metavar="TARGETS", help=f"of {','.join(aot.TARGETS)}; needs no GPU")
    parser.add_argument("--quick", action="store_true", help="compile for gfx950 only what a decode step runs")
    parser.add_argument("--changed", action="store_true", help="compile only what the kept table is not of")
    parser.add_argument("--narrow", action="store_true", help="kernels of weights of 8 and 4 bits")
    parser.add_argument("--only", default="", metavar="WORD", help="ops (or kernels' files) whose name has it")
    parser.add_argument("--model", default="", metavar="WORD", help="models whose name has it")
    parser.add_argument("--tokens", default=",".join(map(str, (*DECODE_BATCHES, PREFILL_TOKENS))), help="of a step")
    parser.add_argument("--compile", action="store_true", help="torch's best may be torch.compile, too (minutes)")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", metavar="FILE.png", help="bars of the shares of the floor")
    options = parser.parse_args()
    if options.compile_only:
        targets = options.compile_only.split(",")
        return compile_only(targets, options.only, options.quick, options.json, options.changed)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here; --compile-only needs none")
    return on_gpu(options)


if __name__ == "__main__":
    raise SystemExit(main())

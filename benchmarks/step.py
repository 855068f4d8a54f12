"""Speed of the worker's step with the scheduler's core in the same process: no sockets, no HTTP, random weights.

Batch 1, offline throughput by number of sequences, prefill, start-up; beside vLLM's figures and the floors where they
are known for the model and the machine. `--profile 1,256,prefill` traces such a stretch: GPU idle share and kernels by
time. No figure without the gate: exact lengths, and a greedy prompt alone gives the same tokens twice.

    python -m benchmarks.step --model 0.6b --profile 1,256 --json OUT
    python -m benchmarks.step --model 8b --format int4 --batches 1,64,256 --json OUT
    python -m benchmarks.step --model tiny --batches 1,4 --prompt 32 --output 16 --set worker.device=cpu
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import models, plots, trace
from benchmarks.gpus import BF16, QUANTIZED
from benchmarks.offline import Offline, Run
from benchmarks.peers import MACHINE, PEERS, VLLM, Figures
from benchmarks.published import PUBLISHED
from benchmarks.report import GateRed, Result, save
from benchmarks.roofline import decode_floor_ms, offline_floor_s, prefill_floor_s
from benchmarks.shapes import ModelShape
from benchmarks.workloads import Mix, Source
from common import config as configuration

GATE = Mix("random", 100, 64)
WINDOW = 40  # decode steps that are traced
WARM = 32  # most sequences of a run that warms up
LEAD = 20  # steps before them
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


class Line(NamedTuple):
    """One row of the table. `better`: 1 where more is better, -1 where less is."""

    name: str
    value: float
    unit: str
    better: int = 0
    peer: float = float("nan")
    goal: float = float("nan")
    floor: float = float("nan")


class Bench:
    """One engine and what is asked of it. Collects the lines of the table and those below it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.form = QUANTIZED[arguments.format] if arguments.format else BF16
        self.batches = [int(count) for count in arguments.batches.split(",")]
        published = PUBLISHED.get(arguments.model)
        self.shape: ModelShape | None = published.shape if published else models.SHAPES.get(arguments.model)
        settings = [
            f"model.source={models.find_model(arguments.model, arguments.max_position)}",
            "model.weights=random",
            f"model.max_len={arguments.max_len}",
            "kv.prefix_cache=false",
            f"scheduler.max_rows={max(self.batches)}",
            "scheduler.step_tokens=8192",
            "scheduler.chunk_beside=0",  # nobody waits for a single token
            *([f"worker.quantize={arguments.format}"] if arguments.format else []),
            *arguments.set,
        ]
        config = configuration.load(None, settings)
        if config.kv.dtype != "auto":
            self.form = self.form._replace(kv_bytes=1.0)
        self.offline = Offline(config)
        self.source = Source(self.offline.engine.facts.vocab_size, arguments.seed)
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.kernels: list[Result] = []  # of the traces
        self.known = torch.cuda.is_available() and MACHINE in torch.cuda.get_device_name()
        self.peer: Figures | None = PEERS.get(self.shape.name) if self.known and self.shape else None
        self.mix = Mix("random", arguments.prompt, arguments.output)

    def startup(self) -> None:
        self.lines.append(Line("start-up", self.offline.ready_s, "s", -1))
        stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.offline.stages_s.items())
        facts = self.offline.engine.facts
        self.notes.append(f"start-up: {stages}; {facts.num_blocks} KV blocks of {facts.block_tokens} tokens")

    def gate(self) -> None:
        """Raises GateRed; exact lengths are checked by every run."""
        (ask,) = self.source.draw(GATE, 1)
        first, second = (self.offline.run([ask]).outputs for _ in range(2))
        if first != second:
            place = next(i for i, pair in enumerate(zip(first[0], second[0], strict=True)) if pair[0] != pair[1])
            raise GateRed(f"the same greedy prompt alone gave other tokens from number {place} on")

    def one(self) -> None:
        """A single sequence: the fastest of its runs."""
        runs = [self.offline.run(self.source.draw(self.mix, 1)) for _ in range(self.arguments.runs)]
        run = min(runs, key=Run.decode_ms)
        peer, floor_ms = self.peer, float("nan")
        if self.known and self.shape:
            floor_ms = decode_floor_ms(self.shape, 1, self.mix.prompt_tokens + self.mix.output_tokens / 2, self.form)
        values = (float("nan"), float("nan"), floor_ms)
        if peer:
            values = (peer.token_ms, float("nan") if self.arguments.format else peer.goal_ms, floor_ms)
        self.lines.append(Line("batch 1", run.decode_ms(), "ms/token", -1, *values))
        first_floor = float("nan")
        if self.known and self.shape:
            first_floor = 1000 * prefill_floor_s(self.shape, self.mix.prompt_tokens, 1)
        self.lines.append(Line("batch 1, first token", 1000 * run.step_s[0], "ms", -1, floor=first_floor))
        self._note_host("batch 1", run)

    def many(self, count: int) -> None:
        """Output tokens per second of `count` sequences that come at once, prefill included."""
        run = self.offline.run(self.source.draw(self.mix, count))
        theirs = self.peer.offline.get(count, float("nan")) if self.peer else float("nan")
        goal = theirs * self.peer.goals.get(count, 1.0) if self.peer else float("nan")
        floor = floor_ms = float("nan")
        if self.known and self.shape:
            prompt, middle = self.mix.prompt_tokens, self.mix.prompt_tokens + self.mix.output_tokens / 2
            floor = run.output_tokens / offline_floor_s(self.shape, count, prompt, run.output_tokens, self.form)
            floor_ms = decode_floor_ms(self.shape, count, middle, self.form)
        name = f"{count} sequences"
        self.lines.append(Line(name, run.output_tokens / run.wall_s, "output tok/s", 1, theirs, goal, floor))
        self.lines.append(Line(f"{name}, decode step", run.full_step_ms(), "ms", -1, floor=floor_ms))
        self._note_host(name, run)

    def prefill(self) -> None:
        count, length = self.arguments.prefill
        run = self.offline.run(self.source.draw(Mix("random", length, 1), count))
        theirs = self.peer.prefill if self.peer else float("nan")
        floor = float("nan")
        if self.known and self.shape:
            floor = run.prompt_tokens / prefill_floor_s(self.shape, length, count)
        name = f"prefill {count} x {length}"
        self.lines.append(Line(name, run.prompt_tokens / run.wall_s, "tok/s", 1, theirs, theirs, floor))
        self._note_host("prefill", run)

    def profile(self, what: str) -> None:
        """Traces a stretch of decode steps of `what` sequences, or the prefill of a few prompts."""
        if not torch.cuda.is_available():
            self.notes.append("no profile: there is no GPU")
            return
        if what == "prefill":
            asks = self.source.draw(Mix("random", self.arguments.prefill[1], 1), min(self.arguments.prefill[0], 16))
            self.offline.run(asks)
            runs: list[Run] = []
            found = trace.record(lambda: runs.append(self.offline.run(asks)))
            self._show(what, found, len(runs[0].hosts))
            return
        asks = self.source.draw(self.mix._replace(output_tokens=4 * (LEAD + WINDOW) + 64), int(what))
        seq_ids = self.offline.begin(asks, 4096)
        self.offline.steps(LEAD)
        found = trace.record(lambda: self.offline.steps(WINDOW - 2))
        self.offline.end(seq_ids)
        self._show(f"decode of {what}", found, WINDOW)

    def _show(self, what: str, found: trace.Trace, steps: int) -> None:
        busy_ms = found.busy_us / steps / 1000
        title = f"{self.arguments.model}, {what}: {found.launches / steps:.0f} launches, {busy_ms:.3f} ms busy per step"
        console.print(trace.table(found, steps, title))
        name = f"kernels_{self.arguments.model}_{what.replace(' ', '_')}"
        self.kernels.append(Result(f"{name}_launches", found.launches / steps, "per step", title))
        for kernel in found.kernels[: trace.TOP]:
            self.kernels.append(Result(f"{name}:{trace.short(kernel.name)}", kernel.total_us / steps, "us/step", title))
        self.lines.append(Line(f"{what}, idle", 100 * found.idle, "%", -1, goal=3.0))

    def _note_host(self, name: str, run: Run) -> None:
        core, execute, wait = run.host_us()
        self.notes.append(f"{name}: host per step {core:.0f} us core, {execute:.0f} us execute, {wait:.0f} us waiting")


def table_of(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title)
    for name in ("", "ours", "", VLLM, "times vLLM", "goal", "floor", "of floor"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for line in lines:
        ratio = line.value / line.peer if line.better > 0 else line.peer / line.value
        share = line.value / line.floor if line.better > 0 else line.floor / line.value
        met = line.value >= line.goal if line.better > 0 else line.value <= line.goal
        style = "" if line.goal != line.goal else "green" if met else "red"
        table.add_row(
            line.name,
            f"[{style}]{number(line.value)}[/]" if style else number(line.value),
            line.unit,
            number(line.peer),
            number(ratio),
            number(line.goal),
            number(line.floor),
            f"{share:.0%}" if share == share else "",
        )
    return table


def number(value: float) -> str:
    """Empty for NaN."""
    return "" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def results_of(lines: Sequence[Line], arguments: argparse.Namespace) -> list[Result]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    conditions = (
        f"{arguments.model}, random weights, prompts of {arguments.prompt}, outputs of {arguments.output}, greedy, "
        f"prefix cache off, {device}, torch {torch.__version__}"
        + (f", {arguments.format} weights" if arguments.format else "")
        + (f", {' '.join(arguments.set)}" if arguments.set else "")
    )
    model = "_".join(filter(None, (arguments.model, arguments.format)))
    return [
        Result(f"step_{model}_{line.name.replace(',', '').replace(' ', '_')}", line.value, line.unit, conditions)
        for line in lines
    ]


def bars(lines: Sequence[Line]) -> list[plots.Bars]:
    """One panel per unit that vLLM has figures for, or else per unit."""
    chosen = [line for line in lines if line.peer == line.peer] or list(lines)
    panels = []
    for unit in dict.fromkeys(line.unit for line in chosen):
        own = [line for line in chosen if line.unit == unit]
        series = {"Valence": [line.value for line in own]}
        if any(line.peer == line.peer for line in own):
            series |= {VLLM: [line.peer for line in own], "floor": [line.floor for line in own]}
        panels.append(plots.Bars("offline", unit, [line.name.replace(" sequences", "") for line in own], series))
    return panels


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", help=f"{', '.join([*models.SHAPES, *PUBLISHED])}, or a model source")
    parser.add_argument("--format", default="", choices=("", *QUANTIZED), help="of the weights, converted at load")
    parser.add_argument("--batches", default="1,16,64,256,512", help="numbers of sequences")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--prefill", type=int, nargs=2, default=(64, 2048), metavar=("COUNT", "TOKENS"))
    parser.add_argument("--runs", type=int, default=3, help="of one sequence; 1: nor is there one before that warms up")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--profile", default="", help="stretches to trace: numbers of sequences, prefill")
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--max-position", type=int, default=0, help="positions of the model; 0: as the original")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write a picture to this .png file")
    return parser.parse_args()


def measure(bench: Bench, arguments: argparse.Namespace) -> None:
    bench.gate()
    for count in bench.batches:
        if arguments.runs > 1:
            bench.offline.run(bench.source.draw(bench.mix._replace(output_tokens=4), min(count, WARM)))
        bench.one() if count == 1 else bench.many(count)
    if not arguments.no_prefill:
        bench.prefill()
    for what in filter(None, arguments.profile.split(",")):
        bench.profile(what)


def show(bench: Bench, arguments: argparse.Namespace) -> None:
    save([*results_of(bench.lines, arguments), *bench.kernels], arguments.json)
    title = f"{arguments.model} {arguments.format}: {bench.mix.prompt_tokens} in, {bench.mix.output_tokens} out"
    console.print(table_of(bench.lines, title))
    for note in bench.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)
    if arguments.plot:
        plots.draw(bars(bench.lines), f"{arguments.model}, offline", arguments.plot)


def main() -> None:
    arguments = parse()
    bench = Bench(arguments)
    bench.startup()
    try:
        measure(bench, arguments)
    except GateRed as reason:
        console.print(f"GATE RED, no figures: {reason}", markup=False)
        sys.exit(1)
    except RuntimeError:
        show(bench, arguments)  # what was measured before it stands
        raise
    show(bench, arguments)


if __name__ == "__main__":
    main()

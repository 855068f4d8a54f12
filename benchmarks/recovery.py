"""kill -9 of every service under load: how long streams pause, and whether anything is lost.

A real `valence serve` with the bundled model in its exact mode; streams over and over; worker, scheduler, tokenizer and
API processes are killed in turn, in pairs, and while the system still recovers. Exit status 1 if a stream on a living
API process did not end with the text of the undisturbed run. `--setting` may shrink or enlarge the system.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.chaos import pictures
from benchmarks.chaos.asks import asks
from benchmarks.chaos.judge import Blow, Pauses, Verdict, judge, pauses
from benchmarks.chaos.kills import SETTINGS, Run, schedule
from benchmarks.chaos.site import Site, Topology, counted
from benchmarks.report import Result, save
from benchmarks.system import System

ORDER = ("none", "api", "tokenizer", "scheduler", "worker", "two at once", "while recovering")


@dataclass
class Plan:
    """What to do. `asks`: different requests; `longest`: most output tokens of one."""

    kills: int = 60
    streams: int = 32
    asks: int = 48
    longest: int = 160
    seed: int = 1
    topology: Topology = field(default_factory=Topology)
    settings: tuple[str, ...] = ()


@dataclass
class Found:
    """What came of it."""

    verdict: Verdict
    pauses: list[Pauses]
    blows: list[Blow]
    arrivals: list[float]
    conditions: str

    def results(self) -> list[Result]:
        results = [
            Result(f"recovery_{kind.kind.replace(' ', '_')}_{name}_s", value, "s", self.conditions)
            for kind in self.pauses
            for name, value in (("median", kind.median_s), ("max", kind.most_s))
        ]
        verdict = self.verdict
        counts = {
            "kills": sum(len(blow.pids) for blow in self.blows),
            "streams": verdict.streams,
            "equal": verdict.equal,
            "broken_with_api": verdict.broken_with_api,
            "refused": verdict.refused,
            "unreachable": verdict.unreachable,
            "faults": len(verdict.faults),
            "tokens_lost": verdict.lost,
            "tokens_duplicated": verdict.duplicated,
        }
        return results + [Result(f"recovery_{name}", value, "", self.conditions) for name, value in counts.items()]


def measure(plan: Plan, console: Console) -> Found:
    """Runs it. Raises NotExact, or TimeoutError when the system does not come back."""
    with System(*SETTINGS, *plan.topology.settings(), *plan.settings) as system, Site(system, plan.topology) as site:
        run = Run(site, asks(plan.asks, plan.longest), plan.streams, plan.seed)
        blows = schedule(site.programs, plan.kills, plan.seed)
        with bar(run, sum(len(blow.victims) for blow in blows), console):
            asyncio.run(act(run, blows))
        processes = ", ".join(f"{count} {service}" for service, count in counted(site.programs).items())
    conditions = (
        f"{processes}; {plan.streams} streams, bundled model, {SETTINGS[0]}, {plan.asks} requests of up to "
        f"{plan.longest} tokens, seed {plan.seed}, {os.cpu_count()} cores"
    )
    order = {kind: place for place, kind in enumerate(ORDER)}
    found = sorted(pauses(run.outcomes, run.blows), key=lambda kind: order[kind.kind])
    arrivals = [at_s for outcome in run.outcomes for at_s in outcome.arrivals]
    return Found(judge(run.outcomes, run.answers, run.blows), found, run.blows, arrivals, conditions)


async def act(run: Run, blows: list[Blow]) -> None:
    await run.learn()
    await run.fire(blows)


@contextlib.contextmanager
def bar(run: Run, kills: int, console: Console) -> Iterator[None]:
    """Kills done, what is going on, streams open and ended."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task: TaskID = progress.add_task("kills", total=kills, more="")

        def tell() -> None:
            done = sum(len(blow.pids) for blow in run.blows)
            more = f"{run.open} streams open, {len(run.outcomes)} ended; {run.stage}"
            progress.update(task, completed=done, more=more)

        run.tell = tell
        yield


def table(found: Found) -> Table:
    table = Table(title="pause of a stream by kind of loss")
    table.add_column("lost")
    for name in ("blows", "streams", "median, s", "max, s", "all ready again: median, s", "max, s"):
        table.add_column(name, justify="right")
    for kind in found.pauses:
        recovery = sorted(kind.recovery)
        figures = (
            f"{kind.median_s:.2f}",
            f"{kind.most_s:.2f}",
            f"{recovery[len(recovery) // 2]:.2f}",
            f"{recovery[-1]:.2f}",
        )
        table.add_row(kind.kind, str(kind.blows), str(len(kind.streams)), *figures)
    table.caption = found.conditions
    return table


def tell_verdict(verdict: Verdict, kills: int, console: Console) -> None:
    console.print(
        f"{kills} kills, {verdict.streams} streams: {verdict.equal} ended with the undisturbed text, "
        f"{verdict.broken_with_api} broke with their API process, {verdict.refused} were refused and "
        f"{verdict.unreachable} found no API process while something was down; "
        f"tokens lost {verdict.lost}, duplicated {verdict.duplicated}, faults {len(verdict.faults)}"
    )
    for fault in verdict.faults:
        console.print(f"  {fault}", style="red", markup=False, soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    for name in ("kills", "streams", "asks", "longest", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name), help="[%(default)s]")
    add_system_arguments(parser)


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    for service, count in Topology()._asdict().items():
        parser.add_argument(f"--{service}", type=int, default=count, help=f"{service} processes [%(default)s]")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="one more setting of the system")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--plot", help="write a picture to this file")


def topology_of(arguments: argparse.Namespace) -> Topology:
    return Topology(*(getattr(arguments, service) for service in Topology._fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--events", help="write every blow and outcome fault to this file, as JSON")
    given = parser.parse_args()
    numbers = (given.kills, given.streams, given.asks, given.longest, given.seed)
    console = Console()
    found = measure(Plan(*numbers, topology_of(given), tuple(given.set)), console)
    console.print(table(found))
    kills = sum(len(blow.pids) for blow in found.blows)
    tell_verdict(found.verdict, kills, console)
    save(found.results(), given.json)
    if given.events:
        text = json.dumps({"blows": msgspec.to_builtins(found.blows), "faults": found.verdict.faults}, indent=1)
        Path(given.events).write_text(text + "\n")
    if given.plot:
        pictures.recovery(found.pauses, found.arrivals, found.blows, f"{kills} kills; {found.conditions}", given.plot)
    sys.exit(1 if found.verdict.faults else 0)


if __name__ == "__main__":
    main()

"""`python -m tests.chaos.soak --minutes 30`: mixed load with kills. Does memory grow, is anything lost?

Exit status 1 if so. The load is in benchmarks/chaos/soak.py, the rule for memory in benchmarks/chaos/memory.py.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from benchmarks.chaos import pictures
from benchmarks.chaos.asks import asks
from benchmarks.chaos.judge import Verdict, judge
from benchmarks.chaos.memory import Growth, growth
from benchmarks.chaos.site import Site, Topology, counted
from benchmarks.chaos.soak import LOAD, SETTINGS, Sample, Soak
from benchmarks.recovery import add_system_arguments, tell_verdict, topology_of
from benchmarks.report import Result, save
from benchmarks.system import System


class Plan(NamedTuple):
    """`warm_s`: of each process's life, not judged; `tolerance_mib`: what a life may always grow by; `pause_s`: of each
    client between two requests.
    """

    length_s: float = 1800.0
    kill_every_s: float = 30.0
    streams: int = 8
    asks: int = 24
    longest: int = 96
    seed: int = 1
    warm_s: float = 120.0
    least_s: float = 120.0
    tolerance_mib: float = 4.0
    pause_s: float = 0.0
    topology: Topology = Topology()
    settings: tuple[str, ...] = ()


class Found(NamedTuple):
    """What came of it. `growths`: of each life that was long enough, by its process's name."""

    run: Soak
    verdict: Verdict
    growths: list[tuple[str, Growth]]
    conditions: str

    @property
    def faults(self) -> list[str]:
        grown = [
            f"{name} grew by {g.grown_mib:.1f} MiB in {g.judged_s:.0f} s" for name, g in self.growths if not g.flat
        ]
        return self.verdict.faults + self.run.faults + grown


def soak(plan: Plan, console: Console) -> Found:
    """Runs it. Raises NotExact, or TimeoutError when the system does not come back or keeps something open."""
    with System(*SETTINGS, *plan.topology.settings(), *plan.settings) as system, Site(system, plan.topology) as site:
        run = Soak(site, asks(plan.asks, plan.longest), plan.streams, plan.seed, plan.pause_s)
        with live(run, plan.length_s, console):
            asyncio.run(act(run, plan))
        processes = ", ".join(f"{count} {service}" for service, count in counted(site.programs).items())
    conditions = (
        f"{processes}; {plan.streams} clients for {plan.length_s / 60:g} min, a kill about every "
        f"{plan.kill_every_s:g} s, bundled model, {SETTINGS[0]}, seed {plan.seed}, {os.cpu_count()} cores"
    )
    growths = [
        (f"{program.name} (pid {life[0].pid})", found)
        for program, lives in run.lives().items()
        for life in lives
        if (found := grown(life, plan)) is not None
    ]
    return Found(run, judge(run.outcomes, run.answers, run.blows), growths, conditions)


def grown(life: list[Sample], plan: Plan) -> Growth | None:
    times, sizes = [sample.at_s for sample in life], [sample.resident_mib for sample in life]
    return growth(times, sizes, plan.warm_s, plan.tolerance_mib, plan.least_s)


async def act(run: Soak, plan: Plan) -> None:
    await run.learn()
    await run.soak(plan.length_s, plan.kill_every_s, max(1.0, plan.length_s / 900))


@contextlib.contextmanager
def live(run: Soak, length_s: float, console: Console) -> Iterator[None]:
    """Memory, files and lives of each process, and what the clients did, while it runs."""
    shown_s = 0.0
    with Live(picture(run, length_s), console=console, auto_refresh=False) as view:

        def tell() -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s > 0.5:
                shown_s = time.monotonic()
                view.update(picture(run, length_s), refresh=True)

        run.tell = tell
        yield
        view.update(picture(run, length_s), refresh=True)


def picture(run: Soak, length_s: float) -> Group:
    table = Table(
        title=f"{run.stage}; {run.open} open, {len(run.outcomes)} ended, {sum(len(b.pids) for b in run.blows)} kills"
    )
    for name in ("process", "pid", "lives", "age, s", "MiB", "files"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for program, lives in run.lives().items():
        last = lives[-1][-1]
        age = f"{last.at_s - lives[-1][0].at_s:.0f}"
        table.add_row(program.name, str(last.pid), str(len(lives)), age, f"{last.resident_mib:.1f}", str(last.files))
    table.caption = ", ".join(f"{kind} {run.did[kind]}" for kind in LOAD)
    done_s = min(time.monotonic() - run.started_s, length_s) if run.started_s else 0.0
    return Group(table, ProgressBar(total=length_s, completed=done_s, width=60))


def table(found: Found) -> Table:
    table = Table(title="memory of each life after warm-up")
    for name in ("process", "judged, s", "MiB", "grown, MiB", "allowed, MiB", "MiB per hour", ""):
        table.add_column(name, justify="left" if name == "process" else "right")
    for name, life in found.growths:
        figures = (
            f"{life.judged_s:.0f}",
            f"{life.resident_mib:.1f}",
            f"{life.grown_mib:.2f}",
            f"{life.allowed_mib:.2f}",
        )
        table.add_row(name, *figures, f"{life.mib_per_hour:.1f}", "flat" if life.flat else "[red]GROWS")
    table.caption = found.conditions
    return table


def results(found: Found) -> list[Result]:
    verdict, run = found.verdict, found.run
    counts = {
        "kills": sum(len(blow.pids) for blow in run.blows),
        "streams": verdict.streams,
        "equal": verdict.equal,
        "broken_with_api": verdict.broken_with_api,
        "refused": verdict.refused,
        "unreachable": verdict.unreachable,
        "tokens_lost": verdict.lost,
        "tokens_duplicated": verdict.duplicated,
        "faults": len(found.faults),
    }
    counts |= {f"clients_{kind.replace(' ', '_')}": run.did[kind] for kind in LOAD}
    memory = [
        Result(
            f"soak_{name.split(' ')[0]}_grown",
            life.grown_mib,
            "MiB",
            f"{name}, {life.judged_s:.0f} s; {found.conditions}",
        )
        for name, life in found.growths
    ]
    return [Result(f"soak_{name}", value, "", found.conditions) for name, value in counts.items()] + memory


def plot(found: Found, path: str) -> None:
    run = found.run
    lives = {
        program.name: [([s.at_s for s in life], [s.resident_mib for s in life]) for life in lives]
        for program, lives in run.lives().items()
    }
    for blow in run.blows:
        blow.at_s -= run.started_s
    pictures.memory(lives, run.blows, f"soak: {found.conditions}", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    parser.add_argument("--minutes", type=float, default=plan.length_s / 60, help="[%(default)s]")
    parser.add_argument("--kill-every", type=float, default=plan.kill_every_s, help="seconds [%(default)s]")
    parser.add_argument("--streams", type=int, default=plan.streams, help="clients at a time [%(default)s]")
    parser.add_argument("--seed", type=int, default=plan.seed, help="[%(default)s]")
    parser.add_argument("--samples", help="write every sample to this file, as JSON")
    add_system_arguments(parser)
    given = parser.parse_args()
    console = Console()
    plan = plan._replace(
        length_s=given.minutes * 60, kill_every_s=given.kill_every, streams=given.streams, seed=given.seed
    )
    found = soak(plan._replace(topology=topology_of(given), settings=tuple(given.set)), console)
    console.print(table(found))
    tell_verdict(found.verdict, sum(len(blow.pids) for blow in found.run.blows), console)
    for fault in found.faults[len(found.verdict.faults) :]:
        console.print(f"  {fault}", style="red", markup=False, soft_wrap=True)
    console.print(
        f"blocks looked at {found.run.watched} times; at the end nothing was open and all blocks were free or cached"
    )
    save(results(found), given.json)
    if given.samples:
        text = json.dumps([[*sample.program, *sample[1:]] for sample in found.run.samples])
        Path(given.samples).write_text(text + "\n")
    if given.plot:
        plot(found, given.plot)
    sys.exit(1 if found.faults else 0)


if __name__ == "__main__":
    main()

"""Simulates many seeds: `python -m tests.sim --seeds 1000`. A failure prints its seed; `--first SEED` repeats it."""

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--actions", type=int, default=250, help="actions of each life")
    options = parser.parse_args()
    console = Console()
    totals: dict[str, float] = {}
    columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("sim", total=options.seeds, seed=options.first)
        for seed in range(options.first, options.first + options.seeds):
            progress.update(task, seed=seed)
            world = World(seed)
            try:
                world.run(options.actions)
            except BaseException:
                console.print(f"[red]seed {seed} failed[/red]: {world.limits} {world.facts}")
                raise
            for name, value in world.fleet.metrics().items():
                totals[name] = totals.get(name, 0) + value
            progress.advance(task)
    console.print(
        f"{options.seeds} seeds passed: " + ", ".join(f"{name} {value:.0f}" for name, value in totals.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

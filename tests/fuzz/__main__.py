"""Fuzzes one thing for long: `python -m tests.fuzz links --budget 100000 --seed 7`; `all` is one after the other.

A fault ends it with the input that made it. The same seed and budget repeat the same cases.
"""

import argparse
import importlib
import secrets
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Name and how many cases make about a minute.
BUDGETS = {
    "core": 8000,
    "links": 6000,
    "http_bytes": 1500,
    "http_schema": 30,
    "files": 1500,
    "templates": 8000,
    "settings": 1200,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("name", choices=[*BUDGETS, "all"])
    parser.add_argument("--budget", type=int, default=0, help="cases; 0: about a minute")
    parser.add_argument("--seed", type=int, default=None, help="of the cases; a new one if not given")
    options = parser.parse_args()
    console = Console()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    for name in BUDGETS if options.name == "all" else [options.name]:
        budget = options.budget or BUDGETS[name]
        console.print(f"python -m tests.fuzz {name} --budget {budget} --seed {seed}")
        module = importlib.import_module(f"tests.fuzz.{name}")
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=budget)
            module.fuzz(budget, seed, lambda task=task, progress=progress: progress.advance(task))
    return 0


if __name__ == "__main__":
    sys.exit(main())

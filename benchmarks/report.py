"""Results of a benchmark: a table for people, JSON for scripts. Every benchmark ends with `report`."""

import json
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class GateRed(Exception):
    """The answers are wrong, so their speed means nothing: a benchmark prints no figure then."""


class Result(NamedTuple):
    """One figure. `conditions` say what it was measured with, so that it can be repeated."""

    name: str
    value: float
    unit: str
    conditions: str


def report(results: list[Result], json_path: str | None = None, title: str = "") -> None:
    """Prints the table, conditions below it, and writes a list of {"name", "value", "unit", "conditions"} to a path."""
    table = Table(title=title)
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("", style="dim", justify="right")
    conditions = list(dict.fromkeys(result.conditions for result in results))
    for result in results:
        value = f"{result.value:,.4g}" if abs(result.value) < 1000 else f"{result.value:,.0f}"
        table.add_row(result.name, value, result.unit, f"[{conditions.index(result.conditions) + 1}]")
    console = Console(highlight=False)
    console.print(table)
    for number, text in enumerate(conditions, 1):
        console.print(f"[{number}] {text}", style="dim", markup=False)
    save(results, json_path)


def save(results: list[Result], json_path: str | None) -> None:
    """Writes a list of {"name", "value", "unit", "conditions"}; nothing without a path."""
    if json_path is not None:
        Path(json_path).write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")

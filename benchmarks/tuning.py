"""What the sections of `benchmarks.tune` share: the clock, the rules for timing, and what a section is.

A launch is timed inside a replayed CUDA graph, as it runs when serving. Weights rotate over more memory than L2 holds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]


class Bench(NamedTuple):
    """One run of the tuner. `deadline`: on time.monotonic; what is not measured by then keeps the rule's choice."""

    device: torch.device
    deadline: float
    bandwidth: float  # bytes per second that a read can reach
    workers: int  # processes that compile
    ops: frozenset[str]  # the ones wanted; empty: all
    missing: bool = False  # only what the tables do not hold yet
    rows: tuple[int, ...] = (1,)  # of the steps whose chains are tuned

    def wants(self, op: str) -> bool:
        return not self.ops or op in self.ops

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


class Tuned(NamedTuple):
    """The new table of an op. Rows hold the shape, the choice, and `us`, `floor` (share of the bytes' floor reached),
    `torch` (torch's time over ours) where they make sense."""

    op: str
    rows: list[Row]


class Section(NamedTuple):
    """What one file tune_<name>.py adds, as its SECTION."""

    name: str
    ops: tuple[str, ...]
    run: Callable[[Bench], list[Tuned]]
    last: bool = False  # begins with what the others' tables say


def merged(held: Sequence[Mapping[str, Any]], found: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows found, before them those held of what was not measured now. `names`: what a row is for."""
    new = {tuple(row[name] for name in names) for row in found}
    return [*(dict(row) for row in held if tuple(row[name] for name in names) not in new), *found]


def seconds(launches: Sequence[Callable[[], object]], span_s: float = 0.004) -> float:
    """Seconds per launch: the median of five spans of replays of a graph that holds all launches once."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()

    def span(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / replays

    span(1)
    replays = max(1, round(span_s / 5 / span(1)))
    return statistics.median(span(replays) for _ in range(5)) / len(launches)

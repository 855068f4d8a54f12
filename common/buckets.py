"""Histograms as lists of counts, and their packed form in heartbeats. Pure.

A bucket count is an index into a list: a fifth of the cost of a client library's histogram, and it is paid for every
token. Packed: float64 little-endian, the counts, then the sum of all values.
"""

import sys
from array import array
from bisect import bisect_left


class Buckets:
    """A histogram: `counts[i]` values in (bounds[i - 1], bounds[i]], the last beyond every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def pack(self) -> bytes:
        return pack([*self.counts, self.total])


def pack(values: list[float]) -> bytes:
    column = array("d", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack(column: bytes, size: int) -> list[float]:
    """The `size` numbers of a packed histogram; zeros for one of another size, as other versions may send."""
    if len(column) != 8 * size:
        return [0.0] * size
    values = array("d", column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def cumulative(bounds: tuple[float, ...], values: list[float], shown: tuple[float, ...]) -> list[tuple[str, float]]:
    """(upper bound as text, values at most that), as Prometheus wants them, for the bounds that are `shown`."""
    rows, running = [], 0.0
    for bound, count in zip((*bounds, None), values, strict=False):
        running += count
        if bound is None or bound in shown:
            rows.append(("+Inf" if bound is None else repr(bound), running))
    return rows

"""Whether a process grows: its life as samples, and the rule that calls it flat. Pure.

Rule: the first `warm_s` of a life do not count (caches fill, KV pages are touched for the first time). Through the rest
goes a line of Theil and Sen (the median of all pairs' slopes, which single peaks do not move). Flat is what grew along
it by no more than the noise around it (three standard deviations, from the median deviation), or 2 % of its size, or
`tolerance_mib`, whichever is most. A life whose rest is shorter than `LEAST_S` cannot be judged.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEAST_S = 60.0
SHARE = 0.02
MOST_POINTS = 240  # pairs are quadratic in them


class Growth(NamedTuple):
    """Of one life, after warm-up. `allowed_mib`: what the rule lets pass."""

    judged_s: float
    resident_mib: float  # median
    grown_mib: float  # along the line, over all of `judged_s`
    allowed_mib: float

    @property
    def flat(self) -> bool:
        return self.grown_mib <= self.allowed_mib

    @property
    def mib_per_hour(self) -> float:
        return self.grown_mib / self.judged_s * 3600


def growth(
    times: Sequence[float], resident_mib: Sequence[float], warm_s: float, tolerance_mib: float, least_s: float = LEAST_S
) -> Growth | None:
    """None if the life is too short to be judged. Times are seconds of any clock."""
    if not times:
        return None
    points = [(t, mib) for t, mib in zip(times, resident_mib, strict=True) if t >= times[0] + warm_s]
    points = points[:: max(1, -(-len(points) // MOST_POINTS))]
    if len(points) < 10 or points[-1][0] - points[0][0] < least_s:
        return None
    judged_s = points[-1][0] - points[0][0]
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))
    offset = statistics.median(mib - slope * t for t, mib in points)
    noise = 3 * 1.4826 * statistics.median(abs(mib - slope * t - offset) for t, mib in points)
    size = statistics.median(mib for _, mib in points)
    return Growth(judged_s, size, slope * judged_s, max(noise, SHARE * size, tolerance_mib))

"""Figures that the API counts itself: latencies, ends of requests, HTTP answers. Pure.

Owned by the process; the hub and the HTTP edge add to it, `/metrics` reads it. A bucket count is an index into a list:
a fifth of the cost of a client library's histogram, and it is paid for every token.
"""

from bisect import bisect_left
from collections import Counter

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip  # noqa: E501
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip  # noqa: E501
E2E_BOUNDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip  # noqa: E501
TOKEN_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


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

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, values at most that), as Prometheus wants them."""
        rows, running = [], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


class Figures:
    def __init__(self) -> None:
        self.first_token = Buckets(TTFT_BOUNDS)
        self.inter_token = Buckets(ITL_BOUNDS)
        self.request = Buckets(E2E_BOUNDS)
        self.prompt_size = Buckets(TOKEN_BOUNDS)
        self.output_size = Buckets(TOKEN_BOUNDS)
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.requests = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.unknown_results = 0
        self.slow_clients = 0
        self.pauses = 0
        self.edge = Answers()


class Answers:
    """What the HTTP edge counts."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)
        self.http_seconds: dict[str, Buckets] = {}
        self.keys: Counter[tuple[str, str]] = Counter()  # (name of the API key, "accepted" or "limited")

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP answer, up to its last byte."""
        self.http[route, method, status] += 1
        if route not in self.http_seconds:
            self.http_seconds[route] = Buckets(E2E_BOUNDS)
        self.http_seconds[route].add(seconds)

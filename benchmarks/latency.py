"""Figures of a load from its streams: throughput, latencies with percentiles, goodput. Pure.

TTFT: from opening the connection to the first text. TPOT: from the first text to the last, by output tokens after the
first. ITL: the gaps between events with text; a token that came together with others has no gap of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import StreamResult

Values = NDArray[np.float64]


class Bounds(NamedTuple):
    """What a request must keep to count as good."""

    ttft_ms: float
    tpot_ms: float


class Spread(NamedTuple):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(NamedTuple):
    """Of one load. Times in milliseconds, rates per second of the time from the first opening to the last end."""

    requests: int
    duration_s: float
    output_per_s: float
    total_per_s: float
    requests_per_s: float
    goodput: float  # share of requests within the bounds
    events_per_token: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread


def spread(values: Sequence[float] | Values) -> Spread:
    found = np.asarray(values, np.float64)
    if not len(found):
        return Spread(*[float("nan")] * 5)
    p50, p90, p99 = np.percentile(found, (50, 90, 99)).tolist()
    return Spread(float(found.mean()), p50, p90, p99, float(found.max()))


def gaps_ms(results: Sequence[StreamResult], begin_s: float = 0.0, end_s: float = float("inf")) -> Values:
    """Gaps between events with text of all streams that end between two times of the monotonic clock."""
    found = [np.zeros(0)]
    for result in results:
        times = np.frombuffer(result.text_s, np.float64) + result.opened_s
        inside = (times[1:] >= begin_s) & (times[1:] <= end_s)
        found.append(1000 * np.diff(times)[inside])
    return np.concatenate(found)


def tpot_ms(result: StreamResult) -> float:
    times = np.frombuffer(result.text_s, np.float64)
    return float(1000 * (times[-1] - times[0]) / (result.output_tokens - 1))


def summarize(results: Sequence[StreamResult], bounds: Bounds) -> Summary:
    """`results`: streams that ended well, at least one."""
    begin_s = min(result.opened_s for result in results)
    duration_s = max(result.opened_s + result.total_s for result in results) - begin_s
    output = sum(result.output_tokens for result in results)
    events = sum(len(result.text_s) // 8 for result in results)
    ttft = np.array([1000 * result.first_s for result in results])
    per_token = np.array([tpot_ms(r) if r.output_tokens > 1 and r.text_s else 0.0 for r in results])
    good = (ttft <= bounds.ttft_ms) & (per_token <= bounds.tpot_ms)
    return Summary(
        requests=len(results),
        duration_s=duration_s,
        output_per_s=output / duration_s,
        total_per_s=(output + sum(result.prompt_tokens for result in results)) / duration_s,
        requests_per_s=len(results) / duration_s,
        goodput=float(good.mean()),
        events_per_token=events / output,
        ttft_ms=spread(ttft),
        tpot_ms=spread([value for value, result in zip(per_token, results, strict=True) if result.output_tokens > 1]),
        itl_ms=spread(gaps_ms(results)),
    )


def flat(summary: Summary) -> dict[str, tuple[float, str]]:
    """Every figure by name, with its unit."""
    found: dict[str, tuple[float, str]] = {
        "output_tokens_per_s": (summary.output_per_s, "tokens/s"),
        "total_tokens_per_s": (summary.total_per_s, "tokens/s"),
        "requests_per_s": (summary.requests_per_s, "1/s"),
        "goodput": (summary.goodput, "of requests"),
        "duration_s": (summary.duration_s, "s"),
        "events_per_token": (summary.events_per_token, "1"),
    }
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        values: Spread = getattr(summary, name)
        found |= {f"{name}_{key}": (value, "ms") for key, value in values._asdict().items()}
    return found

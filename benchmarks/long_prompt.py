"""One very long prompt arrives while other streams decode: what it does to their inter-token latency.

The client processes keep the streams going; this process sends the long prompt and compares the gaps between their
tokens before it came with those until its first token. The goal: the 99th percentile rises by at most one chunk.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import uvloop
from rich.table import Table

from benchmarks.latency import Spread, gaps_ms, spread
from benchmarks.load import StreamResult, run_stream
from benchmarks.serve_client import Clients
from benchmarks.workloads import Ask, Mix, Source

LONG_OUTPUT = 8


class TooShort(ValueError):
    """The decoding streams ended before the long prompt was through."""


class LongPrompt(NamedTuple):
    """`after_s`: when the long prompt comes."""

    streams: int
    mix: Mix  # of the decoding streams; they must outlast the long prompt
    long_tokens: int
    after_s: float


class Shock(NamedTuple):
    streams: int
    prompt_tokens: int
    before_ms: Spread
    during_ms: Spread
    ttft_s: float
    chunk_ms: float  # mean time of a step with a chunk of it

    def flat(self) -> dict[str, tuple[float, str]]:
        found = {"ttft_s": (self.ttft_s, "s"), "chunk_ms": (self.chunk_ms, "ms"), "rise_p99_ms": (self.rise_ms, "ms")}
        for name, values in (("before", self.before_ms), ("during", self.during_ms)):
            found |= {f"itl_{name}_ms_{key}": (value, "ms") for key, value in values._asdict().items()}
        return found

    @property
    def rise_ms(self) -> float:
        return self.during_ms.p99 - self.before_ms.p99

    def table(self, model: str) -> Table:
        table = Table(title=f"{model}: a prompt of {self.prompt_tokens:,} tokens among {self.streams} streams")
        for name in ("ITL ms", "p50", "p90", "p99", "max"):
            table.add_column(name, justify="right")
        for name, values in (("before", self.before_ms), ("during", self.during_ms)):
            table.add_row(name, *(f"{value:.2f}" for value in (values.p50, values.p90, values.p99, values.max)))
        verdict = "kept" if self.rise_ms <= self.chunk_ms else "MISSED"
        table.caption = (
            f"TTFT {self.ttft_s:.2f} s, mean chunk {self.chunk_ms:.2f} ms, "
            f"p99 rises by {self.rise_ms:.2f} ms: goal (at most one chunk) {verdict}"
        )
        return table


class LongStream(threading.Thread):
    """Sends the long prompt from this process at a time of the monotonic clock."""

    def __init__(self, host: str, port: int, request: bytes, at_s: float) -> None:
        super().__init__(daemon=True)
        self.result: StreamResult | None = None
        self._host, self._port, self._request, self._at_s = host, port, request, at_s

    def run(self) -> None:
        time.sleep(max(0.0, self._at_s - time.perf_counter()))
        self.result = uvloop.run(run_stream(self._host, self._port, self._request))


def run_long_prompt(
    clients: Clients, source: Source, plan: LongPrompt, encode: Callable[[Ask], bytes]
) -> tuple[list[StreamResult], StreamResult]:
    """The results of the decoding streams, and that of the long prompt."""
    asks = source.draw(plan.mix, plan.streams)
    ask = Ask(source.ids(plan.long_tokens), LONG_OUTPUT)
    thread = LongStream(*clients.address, encode(ask), time.perf_counter() + plan.after_s)
    thread.start()
    results = clients.run([encode(ask) for ask in asks], plan.streams, None, lambda done: None)
    thread.join()
    assert thread.result is not None
    return results, thread.result


def compare(results: list[StreamResult], long: StreamResult, plan: LongPrompt) -> Shock:
    """Raises ValueError if the streams did not decode before, TooShort if not until the long prompt was through."""
    decoding_s = max(result.opened_s + result.first_s for result in results)
    ended_s = min(result.opened_s + result.total_s for result in results)
    first_s = long.opened_s + long.first_s
    if decoding_s > long.opened_s:
        raise ValueError(f"the streams began {decoding_s - long.opened_s:.1f} s after the long prompt: raise --after-s")
    if ended_s < first_s:
        raise ValueError(
            f"a stream ended {first_s - ended_s:.1f} s before the long prompt's first token: raise --output"
        )
    during = gaps_ms(results, long.opened_s, first_s)
    num_steps = max(len(during) / plan.streams, 1)  # a step gives each stream one token
    return Shock(
        streams=plan.streams,
        prompt_tokens=plan.long_tokens,
        before_ms=spread(gaps_ms(results, decoding_s, long.opened_s)),
        during_ms=spread(during),
        ttft_s=long.first_s,
        chunk_ms=1000 * long.first_s / num_steps,
    )

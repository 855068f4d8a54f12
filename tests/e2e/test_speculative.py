"""Drafts change nothing that a client sees but the time: over HTTP, also when the worker is killed.

By prompt lookup; test_speculative_ranks.py has a draft model in a group of two ranks.
"""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.system import System
from tests.e2e.steered import Steered
from tests.e2e.test_recovery import MODEL, Stream, run, struck
from tests.e2e.test_workers import figures, same, until, until_nothing_is_held

SETTINGS = ("worker.threads=1", "scheduler.max_rows=64", "kv.blocks=512", "model.dtype=float32")
TEXT = "".join(f"The boat number {number} goes out at noon and comes back at night.\n" for number in range(1, 9))
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.5},
)
COMMON = {
    "model": MODEL,
    "max_tokens": 48,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
ASKED = [("completions", COMMON | {"prompt": TEXT} | sampling) for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Steered]:
    with Steered(*SETTINGS, "speculative.method=ngram") as system:
        yield system


@pytest.fixture(scope="module")
def calm(bundled: System) -> list[Stream]:
    """What is said without drafts; the first request also with a stop string, from three quarters on."""
    streams = asyncio.run(run(bundled, ASKED))
    whole = streams[0].texts[0]
    stopped = ("completions", ASKED[0][1] | {"stop": whole[len(whole) * 3 // 4 :][:8]})
    ASKED.append(stopped)
    return [*streams, *asyncio.run(run(bundled, [stopped]))]


STEPS = 6  # of five tokens at most


def accepted(system: System) -> float:
    return sum(figures(system, "accepted_tokens_total").values())


def test_the_same_text_in_fewer_steps(drafting: System, calm: list[Stream]) -> None:
    same(calm, asyncio.run(run(drafting, ASKED)))
    assert {reason for stream in calm for reason in stream.reasons.values()} == {"stop", "length"}
    until(lambda: accepted(drafting) > 10)  # they come with heartbeats
    labels = f'engine="0",model_name="{MODEL}"'
    values = dict(line.rsplit(" ", 1) for line in httpx.get(f"{drafting.url}/metrics", timeout=60).text.splitlines())
    held = float(values[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"])
    first = float(values[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}'])
    assert 0 < first <= float(values[f"vllm:spec_decode_num_drafts_total{{{labels}}}"]) and held > 10
    assert "drafts: " in drafting.valence("status")
    until_nothing_is_held(drafting)


def test_the_same_text_when_the_worker_dies(drafting: Steered, calm: list[Stream]) -> None:
    same(calm, struck(drafting, ASKED, [lambda: drafting.kill("worker")], STEPS))
    until_nothing_is_held(drafting)

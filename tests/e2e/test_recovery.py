"""kill -9 of the only tokenizer under 16 streams: each pauses, and ends with the text of an undisturbed run.

One of two tokenizers, the scheduler and the worker are killed by tests/chaos/test_kills.py.
"""

import asyncio
import concurrent.futures
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Blow, Steered

MODEL = "SmolLM2-135M-Instruct"
NUM_STREAMS = 16
TOKENS = 64
STEPS = 16  # before a blow: two of them are over before the stop string at three quarters of the tokens


Asked = tuple[str, dict[str, Any]]  # path and body


class Stream(NamedTuple):
    texts: dict[int, str]
    reasons: dict[int, str]
    usage: dict[str, Any]
    longest_gap_s: float


@pytest.fixture(scope="module")
def lonely() -> Iterator[Steered]:
    """One tokenizer only: while it restarts there is none. The worker, which stays, is the null one."""
    with Steered("worker.kind=null", "worker.step_us=20000", "scheduler.max_rows=64", "kv.blocks=512") as system:
        yield system


def bodies() -> list[Asked]:
    """Half chat, half completions; greedy and seeded; one with a stop string, one with two choices."""
    asked: list[Asked] = []
    for number in range(NUM_STREAMS):
        common: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        common |= {"temperature": 0} if number % 4 < 2 else {"temperature": 0.8, "seed": 1000 + number}
        common |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if number == 5:
            common["n"] = 2
        text = f"Tell a story about {number} ships."
        if number % 2:
            asked.append(("chat/completions", common | {"messages": [{"role": "user", "content": text}]}))
        else:
            asked.append(("completions", common | {"prompt": text}))
    return asked


async def one(client: httpx.AsyncClient, path: str, body: dict[str, Any], heard: Callable[[float], None]) -> Stream:
    """`heard` is called with the tokens of each choice so far."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    longest_gap_s, last_s, done = 0.0, 0.0, False
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            now_s = time.monotonic()
            longest_gap_s, last_s = max(longest_gap_s, now_s - (last_s or now_s)), now_s
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event["usage"] or usage
            for choice in event["choices"]:
                index = choice["index"]
                assert index not in reasons, "news after the end"
                text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                texts[index] = texts.get(index, "") + text
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
            heard(usage["completion_tokens"] / body.get("n", 1))
    assert done
    heard(math.inf)
    return Stream(texts, reasons, usage, longest_gap_s)


async def run(system: System, asked: Sequence[Asked], heard: list[float] | None = None) -> list[Stream]:
    """All streams at once; `heard` follows the tokens of each."""
    tokens = heard if heard is not None else [0.0] * len(asked)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=f"{system.url}/v1/", timeout=LIMIT_S, limits=limits) as client:
        streams = (
            one(client, path, body, partial(tokens.__setitem__, place)) for place, (path, body) in enumerate(asked)
        )
        return list(await asyncio.gather(*streams))


def struck(system: Steered, asked: Sequence[Asked], blows: Sequence[Blow], steps: int = STEPS) -> list[Stream]:
    """All streams at once, and each blow when all have gone on by `steps` tokens and a step stands still."""
    heard = [0.0] * len(asked)
    sequences = sum(body.get("n", 1) for _, body in asked)
    with system.struck(blows, steps, sequences, lambda number: min(heard) > number * steps):
        return asyncio.run(run(system, asked, heard))


def recovered(system: System) -> float:
    lines = httpx.get(f"{system.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("valence_recovered_total{"))


def disturb(system: Steered, blows: list[Blow]) -> None:
    asked = bodies()
    for _, body in asked:
        if body.get("n") != 2 and "prompt" in body and body["temperature"] == 0:
            whole = asyncio.run(run(system, [("completions", body)]))[0].texts[0]
            body["stop"] = whole[len(whole) * 3 // 4 :][:8]
            break
    calm = asyncio.run(run(system, asked))
    before = recovered(system)
    rough = struck(system, asked, blows)
    for quiet, stream in zip(calm, rough, strict=True):
        assert stream.texts == quiet.texts
        assert stream.reasons == quiet.reasons
        for name in ("prompt_tokens", "completion_tokens"):
            assert stream.usage[name] == quiet.usage[name]
    assert {reason for stream in calm for reason in stream.reasons.values()} == {"stop", "length"}
    gaps = sorted(stream.longest_gap_s for stream in rough)
    usual = sorted(stream.longest_gap_s for stream in calm)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s", end="; ")
    print(f"undisturbed {usual[len(usual) // 2]:.2f} s, {usual[-1]:.2f} s; kills {len(blows)}")
    end_s = time.monotonic() + LIMIT_S
    while recovered(system) == before:
        assert time.monotonic() < end_s, "no stream was handed over"
    while True:
        status = system.status()
        kv = status["kv"]
        if status["requests"] == {"running": 0, "waiting": 0}:
            break
        assert time.monotonic() < end_s, status
    assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]


def test_streams_survive_two_deaths_of_the_only_tokenizer(lonely: Steered) -> None:
    disturb(lonely, [lambda: lonely.kill("tokenizer")] * 2)


def test_a_client_that_leaves_during_the_pause_frees_everything(lonely: System) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{lonely.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
        lonely.kill("tokenizer")
    end_s = time.monotonic() + 120  # its 8,000 steps take 160 s, and the scheduler would give it up after 600
    while lonely.status()["requests"]["running"]:
        assert time.monotonic() < end_s, lonely.status()


def test_requests_wait_while_the_only_tokenizer_restarts(lonely: System) -> None:
    def ask() -> int:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        return httpx.post(f"{lonely.url}/v1/completions", json=body, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        restart = pool.submit(lonely.valence, "restart", "tokenizer")
        answers = [ask()]
        while not restart.done():
            answers.append(ask())
    assert restart.exception() is None and set(answers) == {200}

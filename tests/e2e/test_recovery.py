"""kill -9 of the only tokenizer under 16 streams: each pauses, and ends with the text of an undisturbed run.

One of two tokenizers, the scheduler and the worker are killed by tests/chaos/test_kills.py.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from benchmarks.system import System

MODEL = "SmolLM2-135M-Instruct"
NUM_STREAMS = 16
TOKENS = 64


class Stream(NamedTuple):
    texts: dict[int, str]
    reasons: dict[int, str]
    usage: dict[str, Any]
    longest_gap_s: float


@pytest.fixture(scope="module")
def lonely() -> Iterator[System]:
    """One tokenizer only: while it restarts there is none. The worker, which stays, is the null one."""
    with System("worker.kind=null", "worker.step_us=40000", "scheduler.max_rows=64", "kv.blocks=512") as system:
        yield system


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Half chat, half completions; greedy and seeded; one with a stop string, one with two choices."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for number in range(NUM_STREAMS):
        common: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        common |= {"temperature": 0} if number % 4 < 2 else {"temperature": 0.8, "seed": 1000 + number}
        common |= {"stream_options": {"include_usage": True}}
        if number == 5:
            common["n"] = 2
        text = f"Tell a story about {number} ships."
        if number % 2:
            asked.append(("chat/completions", common | {"messages": [{"role": "user", "content": text}]}))
        else:
            asked.append(("completions", common | {"prompt": text}))
    return asked


async def one(client: httpx.AsyncClient, path: str, body: dict[str, Any], heard: Callable[[], None]) -> Stream:
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
            heard()
    assert done
    return Stream(texts, reasons, usage, longest_gap_s)


async def run(
    system: System, asked: list[tuple[str, dict[str, Any]]], victims: list[Callable[[], None]]
) -> list[Stream]:
    """All streams at once; a victim is called whenever they have gone on by six events each."""
    news = 0
    pending = list(victims)

    def heard() -> None:
        nonlocal news
        news += 1
        if pending and news >= 6 * len(asked) * (len(victims) - len(pending) + 1):
            pending.pop(0)()

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=f"{system.url}/v1/", timeout=120, limits=limits) as client:
        streams = await asyncio.gather(*(one(client, path, body, heard) for path, body in asked))
    assert not pending, "the streams ended before all victims were found"
    return list(streams)


def recovered(system: System) -> float:
    lines = httpx.get(f"{system.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("valence_recovered_total{"))


def kill_tokenizer(system: System, instance: int) -> None:
    """kill -9 of the process that runs now, or of its successor where it has just been killed."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for process in psutil.Process(system.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "services.tokenizer" in command and f"--instance {instance}" in command:
                    process.kill()
                    return
        time.sleep(0.02)
    raise AssertionError("no such tokenizer runs")


def disturb(system: System, victims: list[int]) -> None:
    asked = bodies()
    for _, body in asked:
        if body.get("n") != 2 and "prompt" in body and body["temperature"] == 0:
            whole = asyncio.run(run(system, [("completions", body)], []))[0].texts[0]
            body["stop"] = whole[len(whole) * 3 // 4 :][:8]
            break
    calm = asyncio.run(run(system, asked, []))
    before = recovered(system)
    rough = asyncio.run(run(system, asked, [lambda instance=i: kill_tokenizer(system, instance) for i in victims]))
    for quiet, stream in zip(calm, rough, strict=True):
        assert stream.texts == quiet.texts
        assert stream.reasons == quiet.reasons
        for name in ("prompt_tokens", "completion_tokens"):
            assert stream.usage[name] == quiet.usage[name]
    assert {reason for stream in calm for reason in stream.reasons.values()} == {"stop", "length"}
    gaps = sorted(stream.longest_gap_s for stream in rough)
    usual = sorted(stream.longest_gap_s for stream in calm)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s", end="; ")
    print(f"undisturbed {usual[len(usual) // 2]:.2f} s, {usual[-1]:.2f} s; kills {len(victims)}")
    end_s = time.monotonic() + 30
    while recovered(system) == before:
        assert time.monotonic() < end_s, "no stream was handed over"
    while True:
        status = system.status()
        kv = status["kv"]
        if status["requests"] == {"running": 0, "waiting": 0}:
            break
        assert time.monotonic() < end_s, status
    assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]


def test_streams_survive_two_deaths_of_the_only_tokenizer(lonely: System) -> None:
    disturb(lonely, [0, 0])


def test_a_client_that_leaves_during_the_pause_frees_everything(lonely: System) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{lonely.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
        kill_tokenizer(lonely, 0)
    end_s = time.monotonic() + 20  # sooner than the scheduler would give it up by itself
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

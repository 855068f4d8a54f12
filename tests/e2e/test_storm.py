"""64 concurrent streams of random lengths, with disconnects: each ends once, and nothing is left behind."""

import asyncio
import json
import random
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from benchmarks.system import System
from tests.e2e.conftest import EXACT, REPLICAS
from tests.e2e.scripted import small
from tests.e2e.steered import LIMIT_S

MODEL = "SmolLM2-135M-Instruct"
ROUNDS = 3


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A real worker; its model is small, since what is said does not matter."""
    with System(*REPLICAS, *EXACT, *small(tmp_path_factory.mktemp("storm") / "model")) as system:
        yield system


async def one(client: httpx.AsyncClient, url: str, chance: random.Random) -> str:
    """Runs one stream; returns its finish reason, or "left" if the client disconnected."""
    tokens = chance.randint(1, 24)
    leave_after = chance.randint(1, tokens) if chance.random() < 0.3 else None
    body = {
        "model": MODEL,
        "prompt": "word " * chance.randint(1, 60),
        "max_tokens": tokens,
        "stream": True,
        "seed": chance.randint(0, 2**31),
    }
    reasons, events, ended = [], 0, False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            events += 1
            if leave_after is not None and events >= leave_after:
                return "left"
            reasons += [c["finish_reason"] for c in json.loads(line[6:])["choices"] if c["finish_reason"]]
    assert ended
    assert len(reasons) == 1
    return reasons[0]


async def storm(url: str, seed: int) -> list[str]:
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, url, random.Random(seed * 1000 + i)) for i in range(64))))


def resident_mib(system: System) -> dict[str, float]:
    processes = system.processes()
    return {name: sum(p.memory_info().rss for p in group) / 2**20 for name, group in processes.items()}


def settled(system: System) -> bool:
    status = system.status()
    kv, requests = status["kv"], status["requests"]
    return requests == {"running": 0, "waiting": 0} and kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]


def test_every_stream_ends_once_and_nothing_stays(system: System) -> None:
    asyncio.run(storm(system.url, 0))
    before = resident_mib(system)
    for seed in range(1, ROUNDS + 1):
        reasons = asyncio.run(storm(system.url, seed))
        assert set(reasons) <= {"stop", "length", "left"}
        assert {"length", "left"} <= set(reasons)
    end_s = time.monotonic() + LIMIT_S
    while not settled(system):
        assert time.monotonic() < end_s, system.status()
    # The worker's KV pages are mapped as they are first used: at most 512 blocks of 0.7 MiB.
    allowed = {"api": 40, "tokenizer": 40, "scheduler": 40, "worker": 512 * 0.71 + 100}
    after = resident_mib(system)
    assert {name: mib for name, mib in after.items() if mib > before[name] + allowed[name]} == {}
    open_requests = [
        m for m in httpx.get(f"{system.url}/metrics", timeout=60).text.splitlines() if "open_requests{" in m
    ]
    assert open_requests


def test_a_disconnect_frees_the_blocks(system: System) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{system.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        assert system.status()["requests"]["running"] == 1
    end_s = time.monotonic() + LIMIT_S
    while not settled(system):
        assert time.monotonic() < end_s


@pytest.mark.parametrize("service", ["api", "tokenizer", "scheduler", "worker"])
def test_processes_hold_no_files_open_for_streams(system: System, service: str) -> None:
    for process in system.processes()[service]:
        assert psutil.Process(process.pid).num_fds() < 128

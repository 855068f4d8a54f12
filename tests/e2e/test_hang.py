"""Processes that are stopped, or hang, under running streams: found, replaced, and every stream ends with its text."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Steered

MODEL = "SmolLM2-135M-Instruct"
NUM_STREAMS = 4
TOKENS = 40
STEPS = 16  # of the worker, before somebody hangs


@pytest.fixture(scope="module")
def fragile() -> Iterator[Steered]:
    """Deadlines are measured, and silence is a reason, as by default."""
    replicas = ("services.api.replicas=2", "services.tokenizer.replicas=2", "scheduler.max_rows=16", "kv.blocks=512")
    null = ("worker.kind=null", "worker.step_us=20000", "scheduler.step_deadline_s=0", "links.dead_after_s=5")
    with Steered(*replicas, *null) as system:
        yield system


def bodies() -> list[dict[str, Any]]:
    """Greedy and seeded."""
    asked = []
    for number in range(NUM_STREAMS):
        body: dict[str, Any] = {"model": MODEL, "prompt": f"Tell a story about {number} ships.", "stream": True}
        body |= {"max_tokens": TOKENS, "ignore_eos": True}
        asked.append(body | ({"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 70 + number}))
    return asked


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The whole text, or how the connection broke."""
    text, done = "", False
    try:
        async with client.stream("POST", "completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
    except httpx.TransportError as error:
        return f"broken: {error!r}"
    assert done
    return text


async def run(system: System) -> list[str]:
    """All streams at once, each on a connection of its own."""
    async with httpx.AsyncClient(base_url=f"{system.url}/v1/", timeout=LIMIT_S) as client:
        return list(await asyncio.gather(*(one(client, body) for body in bodies())))


def disturbed(system: Steered, disturb: Callable[[], None]) -> list[str]:
    """`disturb` is called when the worker has made some steps."""
    with system.struck([disturb], STEPS):
        return asyncio.run(run(system))


@pytest.fixture(scope="module")
def calm(fragile: System) -> list[str]:
    return asyncio.run(run(fragile))


def pid_of(system: System, name: str) -> int:
    """Of a process that is up; 0 if it is not, or not ready."""
    service, _, instance = name.rpartition("-")
    for entry in system.status()["processes"]:
        if (entry["service"], entry["instance"], entry["state"]) == (service, int(instance), "ready"):
            return int(entry["pid"])
    return 0


class Victim:
    """A process that runs now; says how long it took until it was gone."""

    def __init__(self, system: System, name: str) -> None:
        self.system, self.name, self.pid = system, name, pid_of(system, name)
        assert self.pid
        self.since_s = time.monotonic()
        self.gone = threading.Thread(target=self._wait, daemon=True)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.watch()

    def watch(self) -> None:
        """From now on; in a thread, since the streams keep the test busy."""
        self.since_s = time.monotonic()
        self.gone.start()

    def _wait(self) -> None:
        psutil.Process(self.pid).wait()
        print(f"{self.name} gone after {time.monotonic() - self.since_s:.1f} s", end="; ")

    def replaced(self) -> None:
        """Waits until another process has taken the place, and all is ready."""
        while (pid := pid_of(self.system, self.name)) in (0, self.pid) or not self.system.ready():
            assert time.monotonic() - self.since_s < LIMIT_S, self.system.output()
        assert not psutil.pid_exists(self.pid) and pid_of(self.system, self.name) == pid
        self.gone.join()

    def log(self) -> str:
        return (self.system.run_dir / "log" / f"{self.name}.log").read_text()


@contextlib.contextmanager
def unwatched(system: System) -> Iterator[None]:
    """`valence serve` is stopped, too: it kills nobody."""
    os.kill(system.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(system.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["worker-0", "tokenizer-0", "scheduler-0"])
def test_a_stopped_process_is_replaced_and_every_stream_ends_with_its_text(
    fragile: Steered, calm: list[str], name: str
) -> None:
    victim = Victim(fragile, name)
    assert disturbed(fragile, victim.stop) == calm
    victim.replaced()


def test_a_stopped_api_is_replaced_and_only_its_own_streams_break(fragile: Steered, calm: list[str]) -> None:
    victim = Victim(fragile, "api-1")
    for text, whole in zip(disturbed(fragile, victim.stop), calm, strict=True):
        assert text == whole or text.startswith("broken: ")
    victim.replaced()
    while (status := fragile.status())["requests"] != {"running": 0, "waiting": 0}:
        assert time.monotonic() - victim.since_s < LIMIT_S, status


def test_a_worker_that_hangs_in_a_step_is_found_by_its_deadline(fragile: Steered, calm: list[str]) -> None:
    """Its heart beats on. The deadline is measured, not set; the worker ends by itself when it is given up."""
    victim = Victim(fragile, "worker-0")

    def hang() -> None:
        (fragile.run_dir / "hang").touch()  # taken away by the worker that hangs
        victim.watch()

    with unwatched(fragile):
        assert disturbed(fragile, hang) == calm
        victim.replaced()
    assert "the scheduler has given this worker up" in victim.log()
    assert "is stuck: no result for" in (fragile.run_dir / "log" / "scheduler-0.log").read_text()


def test_a_process_that_goes_on_after_it_was_given_up_ends_by_itself(fragile: Steered, calm: list[str]) -> None:
    victim = Victim(fragile, "tokenizer-1")
    with unwatched(fragile):
        victim.stop()
        while any(e["pid"] == victim.pid and e["state"] == "ready" for e in fragile.status()["processes"]):
            assert time.monotonic() - victim.since_s < LIMIT_S, fragile.output()
        os.kill(victim.pid, signal.SIGCONT)
        victim.replaced()
    assert "has given this process up" in victim.log()
    assert asyncio.run(run(fragile)) == calm


def test_a_request_that_hangs_every_worker_is_ended_and_the_others_go_on() -> None:
    settings = ("worker.kind=null", "worker.step_us=1000000000", "scheduler.step_deadline_s=1")
    with System(*settings) as system:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=LIMIT_S)
        assert answer.status_code == 500, answer.text
        assert "the worker died 2 times while it ran this request" in answer.json()["error"]["message"]
        end_s = time.monotonic() + LIMIT_S
        while not system.ready():
            assert time.monotonic() < end_s, system.output()

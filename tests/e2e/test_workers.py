"""Two CPU workers: kill -9 of one under streams, which go on at once at the other; scale and restart while serving."""

import asyncio
import concurrent.futures
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.system import System
from tests.e2e.test_recovery import Stream, bodies, run

SETTINGS = ("services.worker.replicas=2", "worker.threads=1", "scheduler.max_rows=64", "kv.blocks=512")
LIMIT_S = 240
STARTED = re.compile(r"worker-(\d+) started \(pid (\d+)\)")


@pytest.fixture(scope="module")
def pair() -> Iterator[System]:
    with System(*SETTINGS, "model.dtype=float32") as system:
        until(lambda: ready_workers(system) == [0, 1])
        yield system


@pytest.fixture(scope="module")
def calm(pair: System) -> list[Stream]:
    """The streams when nobody disturbs them."""
    return asyncio.run(run(pair, bodies(), []))


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come to be"


def ready_workers(system: System) -> list[int]:
    return [p["instance"] for p in system.status()["processes"] if (p["service"], p["state"]) == ("worker", "ready")]


def worker(system: System, instance: int) -> psutil.Process:
    """The process that runs now."""
    for process in psutil.Process(system.process.pid).children(recursive=True):
        command = process.cmdline()
        if "services.worker" in command and command[command.index("--instance") + 1] == str(instance):
            return process
    raise AssertionError("no such worker runs")


def figures(system: System, name: str) -> dict[str, float]:
    """A metric by instance."""
    text = httpx.get(f"{system.url}/metrics").text
    found = re.findall(rf'^valence_{name}\{{[^}}]*instance="(\d+)"[^}}]*\}} ([\d.e+]+)$', text, re.MULTILINE)
    return {instance: float(value) for instance, value in found}


def same(calm: list[Stream], rough: list[Stream]) -> None:
    for quiet, stream in zip(calm, rough, strict=True):
        assert (stream.texts, stream.reasons) == (quiet.texts, quiet.reasons)
        for name in ("prompt_tokens", "completion_tokens"):
            assert stream.usage[name] == quiet.usage[name]


def until_nothing_is_held(system: System) -> None:
    def is_free() -> bool:
        status = system.status()
        kv = status["kv"]
        done = status["requests"] == {"running": 0, "waiting": 0}
        return done and kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]

    until(is_free)


def test_both_workers_take_part(pair: System, calm: list[Stream]) -> None:
    until(lambda: len(figures(pair, "group_blocks")) == 2)
    assert set(figures(pair, "group_blocks").values()) == {512.0}
    steps = figures(pair, "steps_total")
    assert pair.status()["kv"]["blocks_total"] == 1024 and len(steps) >= 2
    assert len(calm) == len(bodies())


def test_streams_go_on_at_once_when_a_worker_is_killed(pair: System, calm: list[Stream]) -> None:
    """The dead one's successor cannot come to help: it is killed too, as long as there are streams."""
    killed: list[float] = []

    def kill() -> None:
        victim = worker(pair, 1)
        victim.suspend()  # so that nothing that it still says is mistaken for the successor's help
        victim.kill()
        killed.append(time.monotonic())

    rough = asyncio.run(run(pair, bodies(), [kill]))
    same(calm, rough)
    assert len(killed) == 1
    gaps = sorted(stream.longest_gap_s for stream in rough)
    usual = sorted(stream.longest_gap_s for stream in calm)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s", end="; ")
    print(f"undisturbed {usual[len(usual) // 2]:.2f} s, {usual[-1]:.2f} s")
    until(lambda: sum(figures(pair, "moved_total").values()) > 0)
    until(lambda: ready_workers(pair) == [0, 1])
    until_nothing_is_held(pair)


def test_streams_do_not_notice_workers_that_leave_and_join(pair: System, calm: list[Stream]) -> None:
    def commands() -> None:
        for command in (("scale", "worker", "1"), ("scale", "worker", "2"), ("restart", "worker")):
            pair.valence(*command)
            done.append(command)

    done: list[Any] = []
    rounds = 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        changing = pool.submit(commands)
        while not changing.done() or not rounds:
            same(calm, asyncio.run(run(pair, bodies(), [])))
            rounds += 1
    changing.result()
    assert len(done) == 3 and ready_workers(pair) == [0, 1]
    until_nothing_is_held(pair)

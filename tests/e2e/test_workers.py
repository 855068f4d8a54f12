"""Two workers: kill -9 of one under streams, which go on at once at the other; scale and restart while serving.

They are null workers: that a real one goes on with a text is proved by tests/chaos/test_kills.py and test_ranks.py.
"""

import asyncio
import concurrent.futures
import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Steered
from tests.e2e.test_recovery import Stream, bodies, run, struck

NULL = ("worker.kind=null", "worker.step_us=20000")
SETTINGS = ("services.worker.replicas=2", *NULL, "scheduler.max_rows=64", "kv.blocks=512")
ASKED = bodies()[:8]  # greedy and seeded, one with two choices


@pytest.fixture(scope="module")
def pair() -> Iterator[Steered]:
    with Steered(*SETTINGS) as system:
        until(lambda: ready_workers(system) == [0, 1])
        yield system


@pytest.fixture(scope="module")
def calm(pair: System) -> list[Stream]:
    """The streams when nobody disturbs them."""
    return struck(pair, ASKED, [])  # both have some: all are admitted before any runs


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come to be"


def ready_workers(system: System) -> list[int]:
    return [p["instance"] for p in system.status()["processes"] if (p["service"], p["state"]) == ("worker", "ready")]


def figures(system: System, name: str, service: str = "") -> dict[str, float]:
    """A metric by instance."""
    text = httpx.get(f"{system.url}/metrics", timeout=60).text
    lines = [
        line for line in text.splitlines() if line.startswith(f"valence_{name}{{") and f'service="{service}' in line
    ]
    return {re.search(r'instance="(\d+)"', line)[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


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
    assert pair.status()["kv"]["blocks_total"] == 1024 and len(calm) == len(ASKED)
    until(lambda: all(figures(pair, "steps_total", "worker").get(str(number), 0) > 40 for number in (0, 1)))


def test_streams_end_at_the_other_worker_when_one_is_killed(pair: Steered, calm: list[Stream]) -> None:
    """The successor cannot help: it is held until all streams have ended."""
    hold = pair.run_dir / "hold"

    def kill() -> None:
        hold.touch()
        pair.kill("worker", 1)

    try:
        rough = struck(pair, ASKED, [kill])
        assert ready_workers(pair) == [0]
    finally:
        hold.unlink()
    same(calm, rough)
    gaps = sorted(stream.longest_gap_s for stream in rough)
    usual = sorted(stream.longest_gap_s for stream in calm)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s", end="; ")
    print(f"undisturbed {usual[len(usual) // 2]:.2f} s, {usual[-1]:.2f} s")
    until(lambda: sum(figures(pair, "moved_total").values()) > 0)
    until(lambda: ready_workers(pair) == [0, 1])
    until_nothing_is_held(pair)


@pytest.mark.parametrize("commands", [[("scale", "worker", "1"), ("scale", "worker", "2")], [("restart", "worker")]])
def test_streams_do_not_notice_workers_that_leave_and_join(
    pair: System, calm: list[Stream], commands: list[tuple[str, ...]]
) -> None:
    asked = ASKED[:4]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        changing = pool.submit(lambda: [pair.valence(*command) for command in commands])
        while True:
            over = changing.done()
            same(calm[:4], asyncio.run(run(pair, asked)))
            if over:
                break
    changing.result()
    assert ready_workers(pair) == [0, 1]
    until_nothing_is_held(pair)

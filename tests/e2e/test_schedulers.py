"""Two schedulers, each with its worker, under streams: one dies, drains, hangs; the number of them changes."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.system import System
from common.config import load
from common.protocol import Status
from tests.e2e.steered import LIMIT_S, Steered
from tests.e2e.test_recovery import Stream, bodies, run, struck
from valence.programs import Program
from valence.status import StatusClient
from valence.supervisor import Supervisor


@pytest.fixture(scope="module")
def pair() -> Iterator[Steered]:
    settings = ("services.scheduler.replicas=2", "services.worker.replicas=2", "worker.kind=null")
    more = ("worker.step_us=20000", "scheduler.max_rows=32", "kv.blocks=512", "links.dead_after_s=10")
    with Steered(*settings, *more) as system:
        until(lambda: len(serving(system)) == 2, "not both schedulers serve")
        yield system


@pytest.fixture(scope="module")
def calm(pair: System) -> list[Stream]:
    return asyncio.run(run(pair, asked()))


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Some of the usual streams."""
    return bodies()[:8]


def until(condition: Callable[[], Any], why: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, why
        time.sleep(0.05)


def ask(system: System) -> dict[int, Status]:
    with StatusClient(load(system.run_dir / "config.toml")) as client:
        return client.ask_each()


def serving(system: System) -> dict[int, Status]:
    return {instance: each for instance, each in ask(system).items() if each.model is not None}


def pids(system: System) -> dict[str, int]:
    return {view.program.name: view.pid for view in Supervisor(system.run_dir).processes()}


def admitted(system: System) -> dict[int, float]:
    """Sequences that each scheduler process has taken so far, those that were handed to it again included."""
    found: dict[int, float] = {}

    def all_answer() -> bool:
        for instance, each in ask(system).items():
            own = next(m for m in each.members if (m.peer.service, m.peer.instance) == ("scheduler", instance))
            found[instance] = own.counters.get("requests", 0.0)
        return found.keys() == {Program.parse(n).instance for n, p in pids(system).items() if p and "scheduler" in n}

    until(all_answer, "not all schedulers answer")
    return found


def disturbed(system: Steered, act: Callable[[], None]) -> tuple[list[Stream], dict[int, float]]:
    """The streams with something done once all of them run; and what each scheduler has of them at that time.

    Begun again while one has none of them: the tokenizers may not know yet that it has come back.
    """
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        streams, shares = attempt(system, act)
        if all(share > 0 for share in shares.values()):
            return streams, shares
    raise AssertionError(f"one scheduler gets nothing: {shares}")


def attempt(system: Steered, act: Callable[[], None]) -> tuple[list[Stream], dict[int, float]]:
    """As `disturbed`; nothing is done where a scheduler has no stream."""
    before = admitted(system)
    shares: dict[int, float] = {}

    def victim() -> None:
        def all_run() -> bool:
            shares.update({key: value - before[key] for key, value in admitted(system).items()})
            return sum(shares.values()) == sum(body.get("n", 1) for _, body in asked())

        until(all_run, f"not all are admitted: {shares}")
        if all(share > 0 for share in shares.values()):
            act()

    return struck(system, asked(), [victim]), shares


def same(streams: list[Stream], calm: list[Stream]) -> None:
    assert [stream.texts for stream in streams] == [stream.texts for stream in calm]
    assert [stream.reasons for stream in streams] == [stream.reasons for stream in calm]
    assert [stream.usage["completion_tokens"] for stream in streams] == [s.usage["completion_tokens"] for s in calm]
    gaps = sorted(stream.longest_gap_s for stream in streams)
    usual = sorted(stream.longest_gap_s for stream in calm)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s", end="; ")
    print(f"undisturbed {usual[len(usual) // 2]:.2f} s, {usual[-1]:.2f} s")


def idle(system: System) -> None:
    """Nothing runs anywhere and every block is free or cached."""

    def all_free() -> bool:
        loads = [each.load for each in ask(system).values()]
        return len(loads) == 2 and all(
            load.blocks_free + load.blocks_cached == load.blocks_total and not load.running + load.waiting
            for load in loads
        )

    until(all_free, "not idle")


def kill(system: System, name: str, number: int) -> None:
    psutil.Process(pids(system)[name]).send_signal(number)


def test_a_killed_scheduler_disturbs_only_its_own_streams(pair: Steered, calm: list[Stream]) -> None:
    before, count = pids(pair), admitted(pair)[1]
    streams, shares = disturbed(pair, lambda: kill(pair, "scheduler-0", signal.SIGKILL))
    same(streams, calm)
    idle(pair)
    after = pids(pair)
    assert {name for name in before if before[name] != after[name]} == {"scheduler-0"}, "workers keep their weights"
    assert admitted(pair)[1] == count + shares[1], "nothing was handed to the other scheduler, nor again"
    assert 0 < admitted(pair)[0] <= shares[0]
    until(lambda: len(serving(pair)) == 2, "the scheduler did not get its worker back")


def test_streams_of_a_scheduler_that_is_stopped_move_to_the_other(pair: Steered, calm: list[Stream]) -> None:
    supervisor, program = Supervisor(pair.run_dir), Program("scheduler", 0)
    count = admitted(pair)[1]
    streams, shares = disturbed(pair, lambda: supervisor.stop(program))
    same(streams, calm)
    assert count + shares[1] < admitted(pair)[1] <= count + shares[0] + shares[1]
    assert httpx.get(f"{pair.url}/health/ready", timeout=60).json()["status"] == "ready"
    found = pair.status()
    assert found["ready"] and {row["instance"] for row in found["schedulers"]} == {1}
    assert {f"{row['service']}-{row['instance']}" for row in found["processes"] if row["state"] == "stopped"} == {
        "scheduler-0"
    }
    supervisor.start(program)
    until(lambda: len(serving(pair)) == 2, "the scheduler did not come back")


def test_streams_of_a_scheduler_that_hangs_move_to_the_other(pair: Steered, calm: list[Stream]) -> None:
    """It goes on late, or `valence serve` has replaced it by then."""
    pid = pids(pair)["scheduler-1"]
    streams, _ = disturbed(pair, lambda: psutil.Process(pid).suspend())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).resume()
    same(streams, calm)
    idle(pair)
    until(lambda: len(serving(pair)) == 2, "the scheduler did not come back")
    same(asyncio.run(run(pair, asked())), calm)


def test_a_tokenizer_dies_and_its_successor_finds_the_schedulers(pair: Steered, calm: list[Stream]) -> None:
    count = admitted(pair)
    streams, shares = disturbed(pair, lambda: kill(pair, "tokenizer-0", signal.SIGKILL))
    same(streams, calm)
    idle(pair)
    assert admitted(pair) == {key: count[key] + shares[key] for key in count}, "each went on where it was"


def test_the_number_may_change_and_one_after_the_other_restart_while_serving(pair: Steered, calm: list[Stream]) -> None:
    before = pids(pair)

    async def meanwhile(*command: str) -> None:
        changing = asyncio.create_task(asyncio.to_thread(pair.valence, *command))
        while True:
            over = changing.done()
            same(await run(pair, asked()), calm)
            if over:
                break
        await changing

    for command in (("restart", "scheduler"), ("scale", "scheduler", "1"), ("scale", "scheduler", "2")):
        asyncio.run(meanwhile(*command))
    until(lambda: len(serving(pair)) == 2, "the workers did not share themselves out")
    after = pids(pair)
    assert {name for name in before if before[name] != after[name]} == {"scheduler-0", "scheduler-1"}
    idle(pair)

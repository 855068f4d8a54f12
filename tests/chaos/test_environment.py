"""The machine around the system fails: no descriptors left, no space left. Streams end as if nothing had been, new
clients are refused or wait, and when there is room again all goes on with the same processes.
"""

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator

import psutil

from benchmarks.chaos.judge import Blow, judge
from benchmarks.chaos.kills import READY_WITHIN_S, Run
from valence.programs import Program

SPARE = 3  # descriptors that a process has left
LOOK_S = 0.05


def pids(run: Run) -> dict[Program, int]:
    return {program: process.pid for program, process in run.site.processes().items()}


def check(run: Run, before: dict[Program, int]) -> None:
    """Every stream had the undisturbed text, the processes are the same, and nothing stays."""
    verdict = judge(run.outcomes, run.answers, run.blows)
    assert verdict.faults == []
    assert verdict.equal == verdict.streams - verdict.unreachable > 0
    assert pids(run) == before
    asyncio.run(run.settle())


@contextlib.contextmanager
def starved(*processes: psutil.Process) -> Iterator[None]:
    """Each process may open `SPARE` descriptors more than the highest it has."""
    with contextlib.ExitStack() as relief:
        for process in processes:
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            highest = max(int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd"))
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 1 + SPARE, limits[1]))
            relief.callback(resource.prlimit, process.pid, resource.RLIMIT_NOFILE, limits)
        yield


def full(process: psutil.Process) -> bool:
    """The process has no descriptor left."""
    return process.num_fds() >= resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]


async def until(condition: bool | object) -> None:
    """Waits for a condition that is a function. Raises TimeoutError."""
    assert callable(condition)
    async with asyncio.timeout(READY_WITHIN_S):
        while not condition():
            await asyncio.sleep(LOOK_S)


def test_api_processes_without_descriptors_go_on_with_their_streams(run: Run) -> None:
    before = pids(run)
    apis = [process for program, process in run.site.processes().items() if program.service == "api"]
    starving = Blow((Program("api", 0), Program("api", 1)), recovering=False)

    async def flood() -> None:
        starving.at_s = time.monotonic()
        run.blows.append(starving)
        connections: list[socket.socket] = []
        with starved(*apis):
            while not all(full(api) for api in apis):
                connections.append(socket.create_connection(("127.0.0.1", run.site.system.port), timeout=60))
                await asyncio.sleep(0)
            events = sum(len(outcome.arrivals) for outcome in run.outcomes)
            ended = len(run.outcomes)
            await until(lambda: len(run.outcomes) > ended or run.open == 0)  # they go on, and come to their ends
            assert sum(len(outcome.arrivals) for outcome in run.outcomes) >= events
        for connection in connections:
            connection.close()
        starving.ready_s = time.monotonic()
        served = sum(outcome.end == "ended" for outcome in run.outcomes)
        await until(lambda: sum(outcome.end == "ended" for outcome in run.outcomes) > served + 2 * run.streams)

    asyncio.run(run.during(flood))
    check(run, before)


def test_a_scheduler_without_descriptors_answers_nobody_new_and_lives(run: Run) -> None:
    """Each question opens a link to the asker. Once that ended the scheduler."""
    before = pids(run)
    scheduler = next(process for program, process in run.site.processes().items() if program.service == "scheduler")

    async def ask() -> None:
        with starved(scheduler):
            opened = [resource.prlimit(scheduler.pid, resource.RLIMIT_NOFILE)]
            for _ in range(30):
                run.site.status()
            assert opened
            ended = len(run.outcomes)
            await until(lambda: len(run.outcomes) > ended + run.streams)
        await until(lambda: run.site.status() is not None)

    asyncio.run(run.during(ask))
    check(run, before)

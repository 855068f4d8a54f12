"""The machine around the system fails: no descriptors, no space, no time (it is suspended). Streams end as if nothing
had been, new clients are refused or wait, and when all is well again the same processes go on.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from benchmarks.chaos.judge import Blow, judge
from benchmarks.chaos.kills import READY_WITHIN_S, Run
from valence.programs import Program

SPARE = 3  # descriptors that a process has left
ASLEEP_S = 10.0  # more than links.dead_after_s
LAG_S = 1.2  # two heartbeats: the scheduler goes on before the others
LOOK_S = 0.05


def pids(run: Run) -> dict[Program, int]:
    return {program: process.pid for program, process in run.site.processes().items()}


def check(run: Run, before: dict[Program, int], replaced: Sequence[Program] = ()) -> None:
    """Every stream had the undisturbed text, the processes are the same but for those replaced, and nothing stays."""
    verdict = judge(run.outcomes, run.answers, run.blows)
    assert verdict.faults == []
    assert verdict.equal == verdict.streams - verdict.unreachable - verdict.refused - verdict.broken_with_api > 0
    after = pids(run)
    assert {program for program, pid in before.items() if after.get(program) != pid} == set(replaced)
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


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
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
            ended = sum(outcome.end == "ended" for outcome in run.outcomes)
            await until(lambda: sum(outcome.end == "ended" for outcome in run.outcomes) > ended)  # they go on
        for connection in connections:
            connection.close()
        starving.ready_s = time.monotonic()
        served = sum(outcome.end == "ended" for outcome in run.outcomes)
        await until(lambda: sum(outcome.end == "ended" for outcome in run.outcomes) > served + 2)

    asyncio.run(run.during(flood))
    check(run, before)


def test_a_scheduler_without_descriptors_answers_nobody_new_and_lives(run: Run) -> None:
    """Each question opens a link to the asker. Once that ended the scheduler."""
    before = pids(run)
    scheduler = next(process for program, process in run.site.processes().items() if program.service == "scheduler")

    async def ask() -> None:
        with starved(scheduler):
            for _ in range(30):
                run.site.status()
            ended = len(run.outcomes)
            await until(lambda: len(run.outcomes) > ended + 2)
        await until(lambda: run.site.status() is not None)

    asyncio.run(run.during(ask))
    check(run, before)


@contextlib.contextmanager
def no_space(run: Run) -> Iterator[None]:
    """No file of the system can grow by a byte, as on a full disk: that is also true for what starts meanwhile.

    A limit, since filling a disk of one's own needs the right to mount one; EFBIG takes the same way as ENOSPC.
    """
    serve = psutil.Process(run.site.system.process.pid)

    def limit(is_full: bool) -> None:
        for process in (serve, *serve.children(recursive=True)):
            most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]  # templates run where it is 0 anyway
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0 if is_full else most, most))

    limit(True)
    try:
        yield
    finally:
        limit(False)


def test_a_full_disk_costs_log_lines_and_nothing_else(run: Run) -> None:
    """Also processes that die meanwhile are replaced. Once the first log line ended the supervisor, and so all."""
    before = pids(run)
    replaced = (Program("scheduler", 0), Program("tokenizer", 1))

    async def fill() -> None:
        with no_space(run):
            for victim in replaced:
                blow = Blow((victim,), recovering=False, at_s=time.monotonic(), pids=run.site.kill((victim,)))
                run.blows.append(blow)
                await run.until_ready()
                blow.ready_s = time.monotonic()
            ended = len(run.outcomes)
            await until(lambda: len(run.outcomes) > ended + 2)
        assert run.site.system.process.poll() is None

    asyncio.run(run.during(fill))
    check(run, before, replaced)


def test_a_suspended_machine_goes_on_where_it_was(run: Run) -> None:
    """All processes stop and go on, the scheduler first: it must not take its own sleep for the silence of others."""
    before = pids(run)
    serve = psutil.Process(run.site.system.process.pid)
    processes = [*run.site.processes().values(), *serve.children(), serve]
    first = run.site.processes()[Program("scheduler", 0)]

    asleep = Blow((Program("scheduler", 0),), recovering=False)  # an API may wake before it has heard of the scheduler

    async def suspend() -> None:
        asleep.at_s = time.monotonic()
        run.blows.append(asleep)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(ASLEEP_S)
        first.send_signal(signal.SIGCONT)
        await until(lambda: run.site.status() is not None)
        await asyncio.sleep(LAG_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        ended = len(run.outcomes)
        await until(lambda: len(run.outcomes) > ended + run.streams)
        asleep.ready_s = time.monotonic()

    asyncio.run(run.during(suspend))
    assert judge(run.outcomes, run.answers, run.blows).unreachable == 0
    check(run, before)

"""SIGSTOP: a process that hangs is found and replaced, and a machine that was suspended as a whole loses nothing."""

import asyncio
import signal
import time

import psutil
import pytest

from benchmarks.chaos.judge import Blow, judge
from benchmarks.chaos.kills import Run
from tests.chaos.test_environment import check, pids, until
from valence.programs import Program

ASLEEP_S = 7.0  # more than links.dead_after_s: everybody seems dead to everybody
LAG_S = 0.5


@pytest.mark.parametrize("name", ["worker-0", "scheduler-0", "tokenizer-1", "api-1"])
def test_a_process_that_hangs_is_replaced(run: Run, name: str) -> None:
    """It neither ends nor answers: nobody but a watcher can tell it from a slow one."""
    victim = Program.parse(name)
    before = pids(run)

    async def freeze() -> None:
        process = run.site.processes()[victim]
        blow = Blow((victim,), recovering=False, at_s=time.monotonic(), pids=[process.pid])
        run.blows.append(blow)
        run.site.killed[process.pid] = victim
        process.send_signal(signal.SIGSTOP)
        try:
            await run.until_ready()
        finally:
            if psutil.pid_exists(process.pid) and process.status() == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)  # nobody has found it
        blow.ready_s = time.monotonic()
        ended = len(run.outcomes)
        await until(lambda: len(run.outcomes) > ended + 2)

    asyncio.run(run.during(freeze))
    check(run, before, [victim])


def test_a_suspended_machine_goes_on_where_it_was(run: Run) -> None:
    """All processes stop and go on, the scheduler first: it must not take its own sleep for the silence of others."""
    before = pids(run)
    serve = psutil.Process(run.site.system.process.pid)
    processes = [*run.site.processes().values(), *serve.children(), serve]
    first = run.site.processes()[Program("scheduler", 0)]

    async def suspend() -> None:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(ASLEEP_S)
        first.send_signal(signal.SIGCONT)
        await asyncio.sleep(LAG_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        ended = len(run.outcomes)
        await until(lambda: len(run.outcomes) > ended + run.streams)

    asyncio.run(run.during(suspend))
    assert judge(run.outcomes, run.answers, run.blows).unreachable == 0
    check(run, before)

"""A machine that was suspended as a whole loses nothing, though everybody was silent for longer than the dead are."""

import asyncio
import signal

import psutil

from benchmarks.chaos.judge import judge
from benchmarks.chaos.kills import Run
from tests.chaos.test_environment import check, pids, until
from valence.programs import Program

ASLEEP_S = 7.0  # more than links.dead_after_s
LAG_S = 1.2  # two heartbeats: the scheduler goes on before the others


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

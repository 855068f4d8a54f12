"""SIGSTOP: a process that hangs is found and replaced, and its streams end as if nothing had been."""

import asyncio
import signal
import time

import psutil
import pytest

from benchmarks.chaos.judge import Blow
from benchmarks.chaos.kills import Run
from tests.chaos.test_environment import check, pids, until
from valence.programs import Program


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

"""Work on texts in threads: what is long or may take its whole time limit does not stand in others' way.

Owned and called by the process on its event loop; results come back on that loop. Each lane is a pool of its own, and
one whose work stands still stalls the process, whatever the others do.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from common.protocol import PromptKind
from common.pulse import Pulses, Work

LONG_BYTES = 100_000  # texts from here on, a tenth of a second of work, go to the thread for long ones


class Lane:
    """A pool and what it has done."""

    def __init__(self, threads: int, name: str) -> None:
        self.pool = ThreadPoolExecutor(threads, name)
        self.started = self.finished = 0

    def work(self) -> Work:
        return self.started - self.finished, self.finished


class Jobs:
    """Jobs by number: encodes of requests by their first seq_id, calls by call_id. `after` is called after each."""

    def __init__(self, threads: int, pulses: Pulses, after: Callable[[], None]) -> None:
        self.short, self._long, self._chat = (
            Lane(threads, "encode"),
            Lane(1, "encode-long"),
            Lane(threads, "encode-chat"),
        )
        self._checked = Lane(threads, "encode-grammar")
        for lane in self._lanes:
            pulses.add(lane.work)
        self._after = after
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Future[Any]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        return self.short, self._long, self._chat, self._checked

    def lane_for(self, size: int, kind: PromptKind, has_grammar: bool = False) -> Lane:
        """For a text of so many bytes or characters. Templates and grammars may take their whole time limits."""
        if has_grammar:
            return self._checked
        if size >= LONG_BYTES:
            return self._long
        return self._chat if kind == PromptKind.CHAT else self.short

    def start(self, job_id: int, lane: Lane, work: Callable[[], Any], done: Callable[["Future[Any]"], None]) -> bool:
        """Runs `work` in a thread and then `done` on the loop, unless cancelled; False if there is such a job."""

        def finish(job: "Future[Any]") -> None:
            del self._jobs[job_id]
            lane.finished += 1
            if not job.cancelled() and not self._closed:
                done(job)
                self._after()

        if job_id in self._jobs:
            return False
        lane.started += 1
        job = self._jobs[job_id] = lane.pool.submit(work)
        job.add_done_callback(lambda job: self._loop.call_soon_threadsafe(finish, job))
        return True

    def cancel(self, job_id: int) -> None:
        """Stops a job that has not begun."""
        if job := self._jobs.get(job_id):
            job.cancel()

    def close(self) -> None:
        """Waits for what runs; nothing more comes back."""
        self._closed = True
        for lane in self._lanes:
            lane.pool.shutdown(wait=True, cancel_futures=True)

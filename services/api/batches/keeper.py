"""Files and batches of this replica: the store on a thread of its own, and the loop that gets batches done.

Owner: the gateway; `run` is one of the process's tasks. Several replicas share the store: each takes lines while the
system has room, and what one had when it died goes to another, or to its successor, once the scheduler has missed it.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from common.config import Api
from common.env import user_data
from common.errors import Reject, RejectReason
from services.api.batches import database, reading, results
from services.api.batches.database import Database
from services.api.batches.files import Files
from services.api.batches.records import Batch, File, Line
from services.api.batches.responses import Responses
from services.api.batches.work import Work

log = logging.getLogger("api")
T = TypeVar("T")
POLL_S = 1.0  # another replica may have begun a batch, or ended
SWEEP_S = 600.0
AGAIN_S = 2.0  # after a refusal that passes
NOT_DONE = {
    "cancelling": ("batch_cancelled", "the batch was cancelled before this request began"),
    "expiring": ("batch_expired", "the time of the batch was over before this request began"),
}


class Store:
    """All that is kept; used on the keeper's thread only."""

    def __init__(self, root: Path, own: int) -> None:
        """Makes what is not there. Raises OSError or sqlite3.Error."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.database = Database(root)
        self.files = Files(self.database, root)
        self.work = Work(self.database, self.files, own)
        self.responses = Responses(self.database, own)


class Answer(NamedTuple):
    """`result`: a line of the output, or of the failures, or a response's body; None: not now, try again."""

    good: bool
    result: bytes | None


class Answerer(Protocol):
    """What the keeper needs of the system (answering.py)."""

    def alive(self) -> list[int]: ...
    def able(self) -> bool: ...
    def welcome(self) -> bool: ...
    async def __call__(self, line: Line) -> Answer: ...


class Keeper:
    def __init__(self, api: Api, own: int) -> None:
        """`own`: this process's incarnation."""
        self.api = api
        self.root = Path(api.storage_dir) if api.storage_dir else user_data() / str(api.port)
        self._own = own
        self._thread = ThreadPoolExecutor(1, "batches")
        self._store: Store | None = None
        self._news = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._responses: dict[str, asyncio.Task[None]] = {}  # of them, those of responses

    async def call(self, what: Callable[[Store], T]) -> T:
        """`what` on the thread of the store. Raises Reject if the store cannot be used."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, what)
        except (OSError, sqlite3.Error) as error:
            log.error("files and batches in %s: %s", self.root, error)
            message = "files and batches cannot be kept now; the log of the server has more"
            raise Reject(RejectReason.UNAVAILABLE, message) from error

    def _call(self, what: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = Store(self.root, self._own)
        return what(self._store)

    def tell(self) -> None:
        """There may be something to do."""
        self._news.set()

    async def run(self, answerer: Answerer) -> None:
        """Until it is cancelled. What was being answered is then left to whoever comes next."""
        looked_s = swept_s = float("-inf")
        try:
            while True:
                self._news.clear()
                if self._store is not None or (self.root / database.NAME).exists():
                    now_s = time.monotonic()
                    if now_s - swept_s >= SWEEP_S:
                        swept_s = now_s
                        await self._try(lambda store: store.files.sweep())
                        await self._try(lambda store: store.responses.sweep(self.api.response_age_s))
                    if now_s - looked_s >= POLL_S:
                        looked_s = now_s
                        await self._look_after(answerer)
                    await self._go_on(answerer)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), POLL_S)
        finally:
            for task in self._running:
                task.cancel()
            self._thread.shutdown(wait=True)
            if self._store is not None:
                self._store.database.close()

    async def _try(self, what: Callable[[Store], T]) -> T | None:
        """As `call`; the disk may be well again the next time."""
        try:
            return await self.call(what)
        except Reject:
            return None

    async def _look_after(self, answerer: Answerer) -> None:
        """What others have left, and whose time is over."""
        if (alive := answerer.alive()) and (count := await self._try(lambda store: store.work.release(alive))):
            log.warning("%d requests of batches are taken over from replicas that have gone", count)
        if alive and (count := await self._try(lambda store: store.responses.release(alive))):
            log.warning("%d responses are taken over from replicas that have gone", count)
        await self._try(lambda store: store.work.expire())

    async def _go_on(self, answerer: Answerer) -> None:
        """Begins what there is to do, and ends what is not wanted any more."""
        await self._respond(answerer)
        while unread := await self._try(lambda store: store.work.take_unread()):
            if not await self._finish_or_put_down(unread, self._read):
                return
        room = self.api.batch_requests - len(self._running)
        if room > 0 and answerer.welcome():
            for line in await self._try(lambda store: store.work.take(room)) or ():
                self._begin(answerer, line)
        while finished := await self._try(lambda store: store.work.take_finished()):
            if not await self._finish_or_put_down(finished, write):
                return

    async def _respond(self, answerer: Answerer) -> None:
        """Responses in the background wait for nobody but those before them."""
        if names := list(self._responses):
            mine = await self._try(lambda store: store.responses.mine(names))
            for name in set(names) - (set(names) if mine is None else mine):
                if name in self._responses:
                    self._responses[name].cancel()
        room = self.api.batch_requests - len(self._running)
        if room > 0 and answerer.able():
            for line in await self._try(lambda store: store.responses.take(room)) or ():
                task = self._responses[line.custom] = self._begin(answerer, line)
                task.add_done_callback(partial(self._forget, line.custom))

    def _forget(self, name: str, task: "asyncio.Task[None]") -> None:
        self._responses.pop(name, None)

    def _begin(self, answerer: Answerer, line: Line) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._answer(answerer, line))
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def _finish_or_put_down(self, batch: Batch, work: Callable[[Store, Batch], None]) -> bool:
        """Whether the work was done. If the store failed, anybody may take the batch at the next look."""
        try:
            await self.call(lambda store: work(store, batch))
        except Reject:
            await self._try(lambda store: store.work.put_down(batch))
            return False
        return True

    async def _answer(self, answerer: Answerer, line: Line) -> None:
        good, result = await answerer(line)
        if result is None:
            await asyncio.sleep(AGAIN_S)
            await self._insist(lambda store: (store.work if line.batch else store.responses).give_back(line))
        else:
            await self._insist(lambda store: (store.work if line.batch else store.responses).answer(line, good, result))

    async def _insist(self, what: Callable[[Store], object]) -> None:
        """As `call`, until the store can do it: nobody else takes a line that this replica has."""
        while True:
            try:
                await self.call(what)
                return
            except Reject:
                await asyncio.sleep(AGAIN_S)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request of a batch could not be answered", exc_info=error)

    def _read(self, store: Store, batch: Batch) -> None:
        try:
            if store.files.find(batch.input, batch.owner) is None:
                raise reading.BadInput([reading.Problem("file_not_found", "the input file was deleted")])
            path = store.files.path(batch.input)
            api = self.api
            store.work.begin(batch.id, reading.read(path, batch.endpoint, api.max_batch_requests, api.max_body_bytes))
        except FileNotFoundError:
            gone = reading.Problem("file_not_found", "the content of the input file is gone")
            store.work.fail(batch.id, msgspec.json.encode([gone]).decode())
        except reading.BadInput as bad:
            store.work.fail(batch.id, msgspec.json.encode(bad.problems).decode())


def write(store: Store, batch: Batch) -> None:
    """Output and failures of a batch that has come to its end."""
    code, message = NOT_DONE.get(batch.status, ("", ""))
    undone = [results.unanswered(name, code, message) for name in store.work.undone(batch.id)]
    output = _written(store, batch, "output", store.work.results(batch.id, good=True))
    failures = _written(store, batch, "error", (*store.work.results(batch.id, good=False), *undone))
    store.work.finish(batch, output, failures)


def _written(store: Store, batch: Batch, what: str, lines: Iterable[bytes]) -> File | None:
    """The file in its place, not listed yet; None if there is nothing in it."""
    path = store.files.arriving()
    with path.open("xb") as file:
        for line in lines:
            file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())  # before an entry says that it is there
    if not path.stat().st_size:
        path.unlink()
        return None
    return store.files.place(path, batch.owner, f"{batch.id}_{what}.jsonl", "batch_output")

"""The tokenizer process: sockets, membership and the encode pool around the Streams. The only file here that awaits.

Every wake-up handles all frames that have arrived: tokens and aborts at once, encodes in the pools afterwards, so that
an abort stops an encode that has not begun and a long prompt delays nobody: neither tokens nor, having a thread of
their own, short prompts. Owns the node and the jobs in the pools.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from common.errors import Reject, RejectReason
from common.lifecycle import Node, Process
from common.membership import Change
from common.protocol import (
    Abort,
    Detokenize,
    Detokenized,
    ModelFacts,
    Refused,
    Submit,
    TokenBatch,
    Tokenize,
    Tokenized,
    ToTokenizer,
)
from services.tokenizer.encode import Encoder
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.sequence import Request
from services.tokenizer.source import Loaded, load
from services.tokenizer.streams import BoxKey, Streams, box_key

log = logging.getLogger("tokenizer")
RETRY_S = 0.02
LONG_BYTES = 100_000  # texts from here on, a tenth of a second of work, go to the thread for long ones
LOADING = Reject(RejectReason.UNAVAILABLE, "the model is still being loaded; try again in a moment")


class TokenizerProcess:
    def __init__(self, process: Process) -> None:
        self.node: Node[ToTokenizer] = Node(process, ToTokenizer, self._receive, self._on_change, self._metrics)
        self.streams = Streams(Lanes(self.node.tell, self._takers, self._speakers))
        self._config = process.config
        self._pool = ThreadPoolExecutor(self._config.tokenizer.threads, "encode")
        self._long_pool = ThreadPoolExecutor(1, "encode-long")
        self._loop = asyncio.get_running_loop()
        self._encoder: Encoder | None = None  # until the model's tokenizer is loaded
        self._model: ModelFacts | None = None  # the last one heard of: a restarting scheduler forgets it for a while
        self._jobs: dict[int, Future[Any]] = {}  # encodes of requests by first seq_id, calls by call_id
        self._foreign: frozenset[int] = frozenset()  # schedulers with another model
        self._retrying = self._closed = False

    async def load(self) -> None:
        """Loads the tokenizer in the pool, so that heartbeats go on. Raises ConfigError."""
        loaded: Loaded = await self._loop.run_in_executor(self._pool, load, self._config.model)
        self.streams.vocabulary = loaded.vocabulary
        self._encoder = Encoder(loaded, self._config.tokenizer.max_template_chars)
        if self._model is not None:
            loaded.vocabulary.widen(self._model.vocab_size)
        gc.collect()
        gc.freeze()  # the tables live as long as the process: no collection needs to look at them
        chat = loaded.no_template or "with a chat template"
        log.info("ready: %d tokens, %s", loaded.vocabulary.size, chat)
        self.node.state = "ready"
        self.node.beat()

    async def drain(self) -> None:
        """Takes nothing new and waits for what is open, at most `links.drain_s`; what remains goes to another one."""
        self.node.state = "draining"
        self.node.beat()
        deadline_s = self._loop.time() + self._config.links.drain_s
        while (self.streams.open_requests or self._jobs) and self._loop.time() < deadline_s:
            await asyncio.sleep(RETRY_S)
        self._flush()

    def close(self) -> None:
        self._closed = True
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self.node.leave()

    def _receive(self, batch: list[tuple[int, ToTokenizer]]) -> None:
        streams = self.streams
        requests: list[Request] = []
        calls: list[tuple[Outbox, Tokenize | Detokenize]] = []
        self.node.progress += len(batch)
        for sender, message in batch:
            if isinstance(message, TokenBatch):
                if (scheduler := self.node.view.instance_of(sender)) is not None:
                    streams.take(message, scheduler)
                else:
                    streams.counts.unknown_results += 1
            elif isinstance(message, Abort):
                self._abort(message.seq_id)
            elif isinstance(message, Submit):
                requests += self._open(sender, message)
            elif isinstance(message, Refused):
                if (scheduler := self.node.view.instance_of(sender)) is not None:
                    streams.refused(message, scheduler)
            elif isinstance(message, (Tokenize, Detokenize)) and (box := self._box(sender, message.call_id)):
                calls.append((box, message))
        for request in requests:
            if request.live:
                self._encode(request)
        for box, call in calls:
            self._call(box, call)
        self._flush()

    def _box(self, sender: int, seq_id: int) -> Outbox | None:
        """The outbox of the API process that an id names; None if its sender is another one."""
        key = box_key(seq_id)
        if key.salt != sender & 0xFFFF:
            self.streams.counts.unknown_results += 1
            return None
        box = self.streams.boxes.get(key)
        if box is None:
            # Its Submit may be faster than the scheduler's word that it has joined.
            box = self.streams.boxes[key] = Outbox(sender, self._loop.time())
        return box

    def _open(self, sender: int, submit: Submit) -> Iterable[Request]:
        box = self._box(sender, submit.seq_id)
        if box is None:
            return ()
        if not 1 <= submit.n <= self._config.api.max_choices:
            box.replies.append(
                Refused(submit.seq_id, RejectReason.INVALID, f"{submit.n} choices are not possible", "n")
            )
            return ()
        request = self.streams.open(submit, box)
        if request is None:
            return ()
        if self._encoder is None or self._model is None:
            self.streams.refuse(request, LOADING)
            return ()
        return (request,)

    def _abort(self, seq_id: int) -> None:
        request = self.streams.abort(seq_id)
        if request is not None and not request.live and (job := self._jobs.get(request.submit.seq_id)):
            job.cancel()

    def _encode(self, request: Request) -> None:
        assert self._encoder is not None and self._model is not None, "checked when the request was opened"
        submit = request.submit
        work = partial(self._encoder.prompt, submit, self._model.vocab_size)
        size = len(submit.text) + len(submit.messages) + len(submit.tokens)
        self._start(submit.seq_id, size, work, partial(self._encoded, request))

    def _encoded(self, request: Request, job: "Future[Any]") -> None:
        if not request.live:
            return
        try:
            assert self._model is not None, "it is never forgotten"
            self.streams.admit(request, result_of(job), self._model)
        except Reject as reject:
            self.streams.refuse(request, reject)

    def _call(self, box: Outbox, call: Tokenize | Detokenize) -> None:
        if self._encoder is None:
            box.replies.append(Refused(call.call_id, LOADING.reason, LOADING.message))
            return
        work = partial(_answer, self._encoder, call)
        size = len(call.tokens) if isinstance(call, Detokenize) else len(call.text) + len(call.messages)
        self._start(call.call_id, size, work, partial(self._answered, box, call.call_id))

    def _answered(self, box: Outbox, call_id: int, job: "Future[Any]") -> None:
        try:
            box.replies.append(result_of(job))
        except Reject as reject:
            box.replies.append(Refused(call_id, reject.reason, reject.message, reject.param))

    def _start(self, job_id: int, size: int, work: Callable[[], Any], done: Callable[["Future[Any]"], None]) -> None:
        """Runs `work` on `size` bytes in a pool and then `done` on the loop."""

        def finish(job: "Future[Any]") -> None:
            del self._jobs[job_id]
            if not job.cancelled() and not self._closed:
                done(job)
                self.node.progress += 1
                self._flush()

        if job_id in self._jobs:
            self.streams.counts.unknown_results += 1  # a repeated call
            return
        pool = self._pool if size < LONG_BYTES else self._long_pool
        job = self._jobs[job_id] = pool.submit(work)
        job.add_done_callback(lambda job: self._loop.call_soon_threadsafe(finish, job))

    def _flush(self) -> None:
        """Sends what waits; what does not fit is tried again soon."""
        sent = self._closed or self.streams.flush(self.node.send)
        if not sent and not self._retrying:
            self._retrying = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self._flush()

    def _on_change(self, change: Change) -> None:
        view = self.node.view
        if view.model is not None and view.model != self._model:
            self._model = view.model
            if self._encoder is not None:
                self.streams.vocabulary.widen(view.model.vocab_size)
        for peer in change.left:
            if peer.service == "api":
                self.streams.drop(BoxKey(peer.instance, peer.incarnation & 0xFFFF))
        oldest_s = self._loop.time() - self._config.links.dead_after_s
        for key, box in list(self.streams.boxes.items()):
            if box.incarnation not in view.members and box.made_s < oldest_s:
                self.streams.drop(key)
        self._follow(change)
        self._flush()

    def _follow(self, change: Change) -> None:
        """One scheduler has spoken. What those have that are going or not heard moves to others."""
        view, lanes, now_s = self.node.view, self.streams.lanes, self._loop.time()
        if change.new_scheduler:
            lanes.renewed(change.scheduler)
        spoken = view.views[change.scheduler]
        lanes.lane(change.scheduler).told(spoken.load, spoken.model)
        for instance in view.foreign - self._foreign:
            log.error("scheduler-%d serves another model than the first one and is not used", instance)
        self._foreign = view.foreign
        for instance in list(lanes.all):
            draining = not view.lost(instance, now_s) and view.views[instance].state == "draining"
            if draining or instance in view.foreign or view.lost(instance, now_s):
                lanes.leave(instance, answers=draining)
            elif view.starved(instance, now_s):
                lanes.leave(instance, starved=True)
        lanes.heard(change.scheduler, now_s, self._config.links.dead_after_s)

    def _takers(self) -> list[int]:
        """Schedulers that take new work."""
        node, now_s = self.node, self._loop.time()
        heartbeat_s = self._config.links.heartbeat_s
        return [each for each in node.schedulers if node.view.takes_work(each, now_s, heartbeat_s)]

    def _speakers(self) -> list[int]:
        """Schedulers that answer."""
        view, now_s, heartbeat_s = self.node.view, self._loop.time(), self._config.links.heartbeat_s
        return [key for key, each in view.views.items() if not each.silent(now_s, heartbeat_s) and view.lists_us(key)]

    def _metrics(self) -> dict[str, float]:
        return {"open_requests": self.streams.open_requests, **msgspec.structs.asdict(self.streams.counts)}


def result_of(job: "Future[Any]") -> Any:
    """What the job returned. Raises its Reject; any other fault of it is logged and becomes a Reject (INTERNAL)."""
    error = job.exception()
    if error is None:
        return job.result()
    if isinstance(error, Reject):
        raise error
    log.error("a tokenizer call failed", exc_info=error)
    raise Reject(RejectReason.INTERNAL, f"the tokenizer failed on this text: {error}")


def _answer(encoder: Encoder, call: Tokenize | Detokenize) -> Tokenized | Detokenized:
    if isinstance(call, Detokenize):
        return Detokenized(call.call_id, encoder.detokenize(call.tokens))
    encoded = encoder.tokenize(call)
    return Tokenized(call.call_id, encoded.tokens.tobytes(), encoded.strings)


async def serve(process: Process) -> None:
    """Until SIGTERM, then drains. Raises ConfigError when the model's tokenizer cannot be used."""
    tokenizer = TokenizerProcess(process)
    beating = asyncio.ensure_future(tokenizer.node.run())
    stopping = asyncio.ensure_future(process.stopping.wait())
    try:
        await tokenizer.load()
        await asyncio.wait({beating, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not beating.done():
            await tokenizer.drain()
    finally:
        stopping.cancel()
        beating.cancel()
        tokenizer.close()
    if beating.done() and not beating.cancelled():
        beating.result()  # it only ends with a fault

"""The tokenizer process: sockets, membership and the encode pool around the Streams. The only file here that awaits.

Every wake-up handles all frames that have arrived: tokens and aborts at once, encodes in the pools afterwards, so that
an abort stops an encode that has not begun and a long prompt delays nobody: neither tokens nor, having a thread of
their own, short prompts. Owns the node and the jobs in the pools.
"""

import asyncio
import gc
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from common.errors import Reject, RejectReason
from common.lifecycle import Node, Process
from common.membership import Change
from common.protocol import (
    Abort,
    Describe,
    Detokenize,
    Detokenized,
    ModelFacts,
    PromptKind,
    Refused,
    Submit,
    TokenBatch,
    Tokenize,
    Tokenized,
    ToTokenizer,
)
from common.recorder import Kind
from common.trace_context import read
from common.tracing import Span, Spans, Value, new_span_id
from services.tokenizer.checker import Checker
from services.tokenizer.encode import Encoder, Prompt
from services.tokenizer.formats import Formats
from services.tokenizer.jobs import Jobs
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.renderer import Renderer
from services.tokenizer.sequence import Request
from services.tokenizer.source import Loaded, load
from services.tokenizer.streams import BoxKey, Streams, box_key

log = logging.getLogger("tokenizer")
Call = Tokenize | Detokenize | Describe
RETRY_S = 0.02
LOADING = Reject(RejectReason.UNAVAILABLE, "the model is still being loaded; try again in a moment")


class TokenizerProcess:
    def __init__(self, process: Process) -> None:
        self.node: Node[ToTokenizer] = Node(process, ToTokenizer, self._receive, self._on_change, self._metrics)
        self.streams = Streams(Lanes(self.node.tell, self._takers, self._speakers))
        self._config = process.config
        self._recorder, self._spans = process.recorder, process.spans
        self._jobs = Jobs(self._config.tokenizer.threads, self.node.pulses, self._after_job)
        self._renderers: list[Renderer] = []
        self._checker = Checker(self._config.tokenizer.max_grammar_s)
        self._loop = asyncio.get_running_loop()
        self._encoder: Encoder | None = None  # until the model's tokenizer is loaded
        self._model: ModelFacts | None = None  # the last one heard of: a restarting scheduler forgets it for a while
        self._foreign: frozenset[int] = frozenset()  # schedulers with another model
        self._retrying = self._closed = False

    async def load(self) -> None:
        """Loads the tokenizer in the pool, so that heartbeats go on. Raises ConfigError."""
        pool = self._jobs.short.pool
        loaded: Loaded = await self._loop.run_in_executor(pool, load, self._config.model, self._renderer)
        self.streams.speak(Formats(loaded.dialects, loaded.vocabulary))
        self._encoder = Encoder(loaded, self._config.tokenizer.max_template_chars, self._checker)
        if self._model is not None:
            loaded.vocabulary.widen(self._model.vocab_size)
        gc.collect()
        gc.freeze()  # the tables live as long as the process: no collection needs to look at them
        chat = loaded.no_template or f"with a chat template, {loaded.dialects.named}"
        log.info("ready: %d tokens, %s", loaded.vocabulary.size, chat)
        self.node.state = "ready"
        self.node.beat()

    def _renderer(self, source: str, special_tokens: dict[str, str], tool_source: str) -> Renderer:
        renderer = Renderer(source, special_tokens, tool_source, self._config.tokenizer.max_template_s)
        self._renderers.append(renderer)
        return renderer

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
        for renderer in self._renderers:
            renderer.close()
        self._checker.close()
        self._jobs.close()
        self.node.leave()

    def _receive(self, batch: list[tuple[int, ToTokenizer]]) -> None:
        streams = self.streams
        requests: list[Request] = []
        calls: list[tuple[Outbox, Call]] = []
        self.node.progress += len(batch)
        for sender, message in batch:
            if isinstance(message, TokenBatch):
                if (scheduler := self.node.view.instance_of(sender)) is not None:
                    streams.take(message, scheduler)
                else:
                    streams.counts.unknown_results += 1
            elif isinstance(message, Abort):
                if box_key(message.seq_id).salt == sender & 0xFFFF:  # nobody ends what another API has asked for
                    self._abort(message.seq_id)
            elif isinstance(message, Submit):
                requests += self._open(sender, message)
            elif isinstance(message, Refused):
                if (scheduler := self.node.view.instance_of(sender)) is not None:
                    streams.refused(message, scheduler)
            elif isinstance(message, Call) and (box := self._box(sender, message.call_id)):
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
        self._recorder.requests.add(Kind.SUBMITTED, submit.seq_id, submit.n, max(submit.origin, 0))
        if self._encoder is None or self._model is None:
            self._refuse(request, LOADING)
            return ()
        return (request,)

    def _refuse(self, request: Request, reject: Reject) -> None:
        self._recorder.refusals.add(Kind.REFUSED, request.submit.seq_id, text=reject.reason.encode())
        self.streams.refuse(request, reject)

    def _abort(self, seq_id: int) -> None:
        request = self.streams.abort(seq_id)
        if request is not None:
            self._recorder.requests.add(Kind.ABORTED, seq_id)
        if request is not None and not request.live:
            self._jobs.cancel(request.submit.seq_id)

    def _encode(self, request: Request) -> None:
        assert self._encoder is not None and self._model is not None, "checked when the request was opened"
        submit = request.submit
        work = partial(self._encoder.prompt, submit, self._model.vocab_size)
        size = len(submit.text) + len(submit.messages) + len(submit.tokens) + len(submit.template_kwargs)
        is_bound = submit.sampling.grammar is not None or submit.options.calls is not None
        lane = self._jobs.lane_for(size, submit.kind, is_bound)
        done = partial(self._encoded, request, self._loop.time())
        if not self._jobs.start(submit.seq_id, lane, work, done):
            self.streams.counts.unknown_results += 1

    def _encoded(self, request: Request, began_s: float, job: "Future[Any]") -> None:
        if request.submit.trace and self._spans:
            self._tell(self._spans, request.submit, began_s, job)
        if not request.live:
            return
        try:
            assert self._model is not None, "it is never forgotten"
            prompt: Prompt = result_of(job)
            self._recorder.requests.add(Kind.ENCODED, request.submit.seq_id, len(prompt.tokens), request.submit.n)
            self.streams.admit(request, prompt, self._model)
        except Reject as reject:
            self._refuse(request, reject)

    def _tell(self, spans: Spans, submit: Submit, began_s: float, job: "Future[Any]") -> None:
        """The part of a trace that is spent on a prompt, in its pool and waiting for it."""
        trace, error = read(submit.trace), job.exception()
        if trace is not None:
            found: dict[str, Value] = {"gen_ai.request.id": f"{submit.seq_id:#018x}"}
            if error is None:
                found["gen_ai.usage.prompt_tokens"] = len(job.result().tokens)
            refused = error.reason if isinstance(error, Reject) else "internal" if error else ""
            end_s = self._loop.time()
            spans.tell(Span("tokenize", trace, new_span_id(), began_s, end_s, found, "internal", refused))

    def _call(self, box: Outbox, call: Call) -> None:
        if self._encoder is None:
            box.replies.append(Refused(call.call_id, LOADING.reason, LOADING.message))
            return
        work = partial(_answer, self._encoder, call, self._model.max_model_len if self._model else 0)
        if isinstance(call, Detokenize | Describe):
            size = len(call.tokens) if isinstance(call, Detokenize) else 0
            lane = self._jobs.lane_for(size, PromptKind.TOKENS)
        else:
            asked = call.submit or call
            lane = self._jobs.lane_for(len(asked.text) + len(asked.messages), asked.kind)
        if not self._jobs.start(call.call_id, lane, work, partial(self._answered, box, call.call_id)):
            self.streams.counts.unknown_results += 1  # a repeat

    def _answered(self, box: Outbox, call_id: int, job: "Future[Any]") -> None:
        try:
            box.replies.append(result_of(job))
        except Reject as reject:
            box.replies.append(Refused(call_id, reject.reason, reject.message, reject.param))

    def _after_job(self) -> None:
        self.node.progress += 1
        self._flush()

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
            member = view.members.get(box.incarnation)
            if (member is None or member.peer.service != "api") and box.made_s < oldest_s:
                self.streams.drop(key)
        self._follow(change)
        self._flush()

    def _follow(self, change: Change) -> None:
        """One scheduler has spoken. What those have that are going or not heard moves to others."""
        view, lanes, now_s = self.node.view, self.streams.lanes, self._loop.time()
        if change.new_scheduler:
            if self.streams.open_requests:
                self._recorder.life.add(Kind.READMITTED, a=self.streams.open_requests)
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
    raise Reject(RejectReason.INTERNAL, "the tokenizer failed on this text; its log has more")


def _answer(encoder: Encoder, call: Call, max_model_len: int) -> Tokenized | Detokenized:
    if isinstance(call, Detokenize):
        return Detokenized(call.call_id, encoder.detokenize(call.tokens))
    if isinstance(call, Describe):
        return Detokenized(call.call_id, encoder.describe())
    encoded = encoder.tokenize(call, max_model_len)
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

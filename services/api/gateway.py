"""What the endpoints see of the system: the model's facts, readiness, and the way to the tokenizers.

Owns the hub, the figures and this process's membership; one per process. Messages come in by callback and are handed
to the hub batch by batch, so that consumers are told once for everything that waited.
"""

import asyncio
import logging
import math
import time
from typing import NamedTuple

import msgspec

from common.errors import Reject, RejectReason
from common.lifecycle import Node, Process
from common.membership import Change
from common.protocol import (
    AbortNamed,
    Control,
    Describe,
    Detokenize,
    Detokenized,
    ModelFacts,
    Peer,
    Refused,
    Submit,
    TextBatch,
    ToApi,
    Tokenize,
    Tokenized,
)
from common.pulse import Work, standstill
from common.recorder import Kind
from services.api.batches.keeper import Keeper
from services.api.bodies import Bodies
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.traces import Tracer

log = logging.getLogger("api")
KEEP_ALIVE_S = 15.0  # a stream that was silent for so long gets a comment


class Missing(NamedTuple):
    """A service that is needed and not there."""

    service: str
    reason: str


class Gateway:
    def __init__(self, process: Process) -> None:
        self.config = process.config
        self.since_s = process.since_s
        self.instance = process.instance
        self.leaving = False  # told to stop: not ready, though it may still serve for a while
        self.draining = False  # takes no new work
        self.figures = Figures()
        self.node: Node[ToApi] = Node(
            process, ToApi, self._receive, self._on_change, self._metrics, self.figures.histograms
        )
        limit = self.config.api.max_open_requests
        routes = Routes(process.instance, process.incarnation)
        self.hub = Hub(routes, limit, self._send, self.figures, self.config.links.recover_s)
        self.recorder = process.recorder
        self.tracer = Tracer(self.config.traces, process.spans) if process.spans else None
        self.bodies = Bodies(self.config.api.max_held_bytes)
        self.keeper = Keeper(self.config.api, process.incarnation)
        self._tokenizer_s = float("-inf")  # when a tokenizer was last ready
        self.node.pulses.add(self._work)

    @property
    def max_choices(self) -> int:
        """Choices of one request; more than can ever be open is the client's mistake, not overload."""
        return min(self.config.api.max_choices, self.config.api.max_open_requests)

    @property
    def retry_after_s(self) -> int:
        """When a client that is refused now should come back: when the queue will have moved on, within bounds."""
        api = self.config.api
        return max(api.retry_after_s, min(math.ceil(self.node.view.load.wait_s), api.max_retry_after_s))

    def missing(self) -> list[Missing]:
        """What keeps this process from serving; empty when it is ready. One scheduler with a worker is enough."""
        absent = self._absent()
        if self.leaving or self.draining:
            absent.insert(0, Missing("api", "this process is shutting down"))
        return absent

    def stalled(self) -> list[Missing]:
        """Processes that do nothing although work waits; empty when all get on, or have nothing to do."""
        own, after_s = self.node.process.incarnation, self.config.links.stalled_after_s
        found = []
        for incarnation, member in self.node.view.members.items():
            service, instance = member.peer.service, member.peer.instance
            if incarnation != own and (why := standstill(member.counters, after_s)):
                found.append(Missing(f"{service}-{instance}", f"{service}-{instance}: {why}"))
        if why := standstill(self.node.pulses.last, after_s):
            found += [Missing(f"api-{self.instance}", f"api-{self.instance}: {why}"), *self._absent()]
        return found

    def _work(self) -> Work:
        """What is open here gets on when anything comes for it, or the scheduler plans steps at all."""
        return len(self.hub.choices) + len(self.hub.calls), self.node.progress + self.node.view.load.steps

    def _absent(self) -> list[Missing]:
        view, absent = self.node.view, []
        if time.monotonic() - view.heard_s > self.config.links.dead_after_s:
            absent.append(Missing("scheduler", "the scheduler is not heard"))
        if view.model is None:
            absent.append(Missing("worker", f"no worker is ready{self._stage('worker')}"))
        if not self.tokenizers():
            absent.append(Missing("tokenizer", f"no tokenizer is ready{self._stage('tokenizer')}"))
        return absent

    def impaired(self) -> list[Missing]:
        """Schedulers that should serve and do not."""
        view, now_s, found = self.node.view, time.monotonic(), []
        for instance in self.node.schedulers[: view.count or None]:
            name = f"scheduler-{instance}"
            if view.lost(instance, now_s):
                found.append(Missing(name, f"{name} is not heard"))
            elif instance in view.foreign:
                found.append(Missing(name, f"{name} serves another model and is not used"))
            elif view.views[instance].model is None:
                found.append(Missing(name, f"{name} has no worker that is ready"))
        return found

    def facts(self) -> ModelFacts:
        """The model, once everything needed to serve it is there. Raises Reject (UNAVAILABLE) before.

        A tokenizer that was here a moment ago is expected back: requests wait for it.
        """
        absent = self._absent()
        if self.draining:
            absent.insert(0, Missing("api", "this process is shutting down"))
        expected = time.monotonic() - self._tokenizer_s <= self.config.links.recover_s
        if absent and not (expected and all(each.service == "tokenizer" for each in absent)):
            raise Reject(RejectReason.UNAVAILABLE, "; ".join(each.reason for each in absent))
        assert self.node.view.model is not None
        return self.node.view.model

    def tokenizers(self) -> list[Peer]:
        return self.node.view.ready("tokenizer")

    def siblings(self) -> list[Peer]:
        """Other API processes that take requests."""
        own = self.node.process.incarnation
        return [peer for peer in self.node.view.ready("api") if peer.incarnation != own]

    def open(self, submits: list[Submit], arrived_s: float, limit: int) -> Request:
        return self.hub.open(submits, self.tokenizers(), arrived_s, limit)

    def record_received(self, identity: str, request: Request) -> None:
        """Which sequences a client's request id stands for; from now on they tell what happens to them."""
        request.record = self.recorder.requests.add
        age_us = int((time.monotonic() - request.opened_s) * 1e6)
        for choice in request.choices:
            if choice.seq_id == choice.first:
                asked = choice.first, choice.submit.n, age_us
                self.recorder.requests.add(Kind.RECEIVED, *asked, text=identity.encode())

    async def ask(self, message: Tokenize | Detokenize | Describe) -> Tokenized | Detokenized:
        """One question to a tokenizer. Raises Reject."""
        answer: asyncio.Future[Tokenized | Detokenized] = asyncio.get_running_loop().create_future()

        def reply(result: Tokenized | Detokenized | Reject) -> None:
            if answer.done():
                return  # the client has gone
            if isinstance(result, Reject):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self.hub.call(message, self.tokenizers(), reply)
        return await answer

    def abort(self, name: str, tenant: str) -> int:
        """Ends the requests of this name, here and at all siblings. How many there were here."""
        for peer in self.siblings():
            self.node.send(peer.incarnation, AbortNamed(name, tenant))
        count = self._abort(name, tenant)
        self.hub.flush()
        return count

    def _abort(self, name: str, tenant: str) -> int:
        found = [request for request in self.hub.requests() if request.called(name, tenant)]
        for request in found:
            self.hub.fail(request, Reject(RejectReason.ABORTED, "the request was aborted"))
        return len(found)

    def control(self, asked: Control) -> bool:
        """Tells all schedulers. False if one could not be told."""
        return asked == Control() or self.node.tell_all(asked)

    def set_leaving(self, leaving: bool) -> None:
        """Not ready any more though it serves on, or ready again."""
        self.leaving = leaving
        self.node.state = "draining" if leaving else "ready"
        self.node.beat()

    def sweep(self, now_s: float) -> None:
        """Called every few seconds: the scheduler may be silent, too."""
        self._recover(now_s)
        self.hub.flush()
        self._keep_alive(now_s)

    def _keep_alive(self, now_s: float) -> None:
        """Comments for streams that were silent for long."""
        for request in self.hub.requests():
            newest_s = max(request.heard_s, *(choice.last_s for choice in request.choices))
            if now_s - newest_s >= KEEP_ALIVE_S and request.consumer is not None:
                request.heard_s = now_s
                request.consumer.keep_alive()

    def end_all(self, message: str) -> None:
        """Ends every open request with an error."""
        for request in self.hub.requests():
            self.hub.fail(request, Reject(RejectReason.UNAVAILABLE, message))
        self.hub.flush()

    def _receive(self, batch: list[tuple[int, ToApi]]) -> None:
        now_s, hub = time.monotonic(), self.hub
        for sender, message in batch:
            member = self.node.view.members.get(sender)
            if member is not None and member.peer.service == "api" and isinstance(message, AbortNamed):
                self._abort(message.name, message.tenant)
            elif member is None or member.peer.service != "tokenizer":
                self.figures.unknown_results += 1
            elif isinstance(message, TextBatch):
                hub.feed(message, now_s)
            elif isinstance(message, Refused):
                hub.refuse(message)
            elif isinstance(message, Tokenized | Detokenized):
                hub.answer(message)
        hub.flush()
        self.node.progress += len(batch)

    def _on_change(self, change: Change) -> None:
        now_s = time.monotonic()
        for peer in change.left:
            if peer.service == "tokenizer":
                log.warning("tokenizer-%d has gone", peer.instance)
                self.hub.lose(peer.incarnation, now_s)
        if self.tokenizers():
            self._tokenizer_s = now_s
        self._recover(now_s)
        self.hub.flush()

    def _recover(self, now_s: float) -> None:
        """A tokenizer that has not heard of the model could take nothing; a worker may take long to load it."""
        self.hub.recover(self.tokenizers() if self.node.view.model else None, now_s)

    def _send(self, receiver: int, message: msgspec.Struct) -> bool:
        return self.node.send(receiver, message) if receiver else self.node.tell_all(message)

    def _metrics(self) -> dict[str, float]:
        own = {"open_requests": len(self.hub.choices), "recovered": self.hub.recovered}
        return own | self.figures.counters()

    def _stage(self, service: str) -> str:
        """Start-up progress of a service, for people who wait."""
        for member in self.node.view.members.values():
            if member.peer.service == service and member.stage is not None:
                stage = member.stage
                return f" ({stage.stage} {stage.done}/{stage.total})" if stage.total else f" ({stage.stage})"
        return ""

"""The scheduler process: sockets and membership around the pure core. The only file of the scheduler that awaits.

Every wake-up turns all frames that have arrived into one list of events, calls the core once, sends what it returns.
Owns the registry, the links and the choice of the worker; the core owns requests and blocks.
"""

import asyncio
import gc
import logging

import msgspec

from common import config as configuration
from common.lifecycle import Process, scheduler_endpoint
from common.metrics import checked
from common.protocol import (
    Abort,
    Admit,
    Goodbye,
    Heartbeat,
    Hello,
    ModelFacts,
    Pause,
    Peer,
    Refused,
    Status,
    StatusQuery,
    StepResult,
    Stop,
    Story,
    StoryQuery,
    ToScheduler,
    WorkerReady,
    tokenizer_of,
)
from common.transport import AsyncInbox, Push
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    ApiLost,
    Effect,
    Event,
    SendPlan,
    SendRefused,
    SendTokens,
    Tick,
    TokenizerLost,
    WorkerFault,
    WorkerLost,
)
from services.scheduler.members import Registry

log = logging.getLogger("scheduler")


class SchedulerProcess:
    def __init__(self, process: Process, core: SchedulerCore) -> None:
        self.process = process
        self.core = core
        links = process.config.links
        endpoint = scheduler_endpoint(process.config)
        self.inbox: AsyncInbox[ToScheduler] = AsyncInbox(endpoint, ToScheduler, links.queue, process.counters)
        root = f"ipc://{process.config.run_dir}/" if links.transport == "ipc" else f"tcp://{links.host}:"
        self.registry = Registry(process.peer(self.inbox.endpoint), (root,), links.dead_after_s)
        self.fingerprint = configuration.fingerprint(process.config)
        self._links: dict[int, Push] = {}  # by incarnation
        self._tokenizers: dict[int, Push] = {}  # by instance
        self._worker = 0  # incarnation of the worker that runs our plans
        self._spare: dict[int, WorkerReady] = {}  # workers that wait to take over
        self._model: ModelFacts | None = None
        self._early: list[Admit | Abort | Stop] | None = []  # came before the first worker; None once there was one
        self._changed = False  # members changed since the last broadcast

    def receive(self, batch: list[tuple[int, ToScheduler]]) -> None:
        """All frames of one wake-up, in order."""
        events: list[Event] = []
        for sender, message in batch:
            if isinstance(message, StepResult):
                if sender == self._worker:
                    events.append(message)
            elif isinstance(message, Admit | Abort | Stop):
                # An API gives up by itself what no tokenizer has.
                service = self.registry.service_of(sender)
                if service == "tokenizer" or (service == "api" and isinstance(message, Abort)):
                    self._queue(events, message)
            elif isinstance(message, Pause):
                if self.registry.service_of(sender) == "api":
                    events.append(message)
            else:
                events += self._control(sender, message)
        self._handle(events)
        if self._changed:
            self._broadcast()

    def _queue(self, events: list[Event], message: Admit | Abort | Stop) -> None:
        """A successor of a scheduler gets its predecessor's requests before its worker: the core cannot judge them."""
        if self._early is None:
            events.append(message)
        elif len(self._early) < 2 * self.process.config.scheduler.max_waiting:
            self._early.append(message)
        elif isinstance(message, Admit):
            text = "the scheduler has just started and its queue is full"
            self._perform(SendRefused(tokenizer_of(message.seq_id), Refused(message.seq_id, "overloaded", text)))

    def _control(self, sender: int, message: ToScheduler) -> list[Event]:
        now_s = self._now_s()
        match message:
            case Heartbeat():
                self._changed |= self.registry.heartbeat(sender, message, now_s)
            case Hello():
                return self._on_hello(sender, message, now_s)
            case Goodbye():
                peer = self.registry.remove(sender)
                return self._on_left(peer, "left") if peer else []
            case WorkerReady():
                return self._on_worker(sender, message)
            case StatusQuery(reply_to):
                status = Status(self.registry.members(), self.core.load(), self._model)
                self._reply(reply_to, status)
            case StoryQuery(reply_to, seq_id):
                self._reply(reply_to, Story(self.core.story(seq_id)))
        return []

    def _on_hello(self, sender: int, hello: Hello, now_s: float) -> list[Event]:
        joined, replaced = self.registry.hello(sender, hello, now_s)
        events = self._on_left(replaced, "was replaced") if replaced else []
        if joined:
            log.info("%s-%d joined (pid %d)", joined.service, joined.instance, joined.pid)
            if hello.config_hash != self.fingerprint:
                log.warning("%s-%d runs with other settings than the scheduler", joined.service, joined.instance)
            self._links[sender] = self.process.push(joined.endpoint)
            if joined.service == "tokenizer":
                self._tokenizers[joined.instance] = self._links[sender]
        self._changed = True
        return events

    def _on_left(self, peer: Peer, how: str) -> list[Event]:
        log.info("%s-%d %s", peer.service, peer.instance, how)
        self._changed = True
        self.inbox.departed = self.registry.departed
        if link := self._links.pop(peer.incarnation, None):
            link.close()
        self._spare.pop(peer.incarnation, None)
        if peer.service == "api":
            return [ApiLost(peer.instance)]
        if peer.service == "tokenizer":
            self._tokenizers.pop(peer.instance, None)
            return [TokenizerLost(peer.instance)]
        if peer.incarnation == self._worker:
            return self._on_worker_lost()
        return []

    def _on_worker(self, sender: int, ready: WorkerReady) -> list[Event]:
        if self.registry.service_of(sender) != "worker":
            return []
        if self._worker == sender:
            return []  # a repeat
        if self._worker:
            self._spare[sender] = ready
            return []
        self._worker, self._model = sender, ready.model
        self._changed = True
        early, self._early = self._early, None
        return [ready, *(early or ())]

    def _on_worker_lost(self) -> list[Event]:
        self._worker, self._model = 0, None
        events: list[Event] = [WorkerLost()]
        if self._spare:
            sender, ready = self._spare.popitem()
            events += self._on_worker(sender, ready)
        return events

    def _handle(self, events: list[Event]) -> None:
        if not events:
            return
        for effect in self.core.handle(events, self._now_s()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendPlan(plan):
                self._links[self._worker].send(plan)
            case SendTokens(tokenizer, batch):
                if link := self._tokenizers.get(tokenizer):
                    link.send(batch)
            case SendRefused(tokenizer, refused):
                if link := self._tokenizers.get(tokenizer):
                    link.send(refused)
            case WorkerFault(reason):
                log.error("the worker broke the protocol: %s", reason)
                if peer := self.registry.remove(self._worker):
                    self._handle(self._on_left(peer, "was given up"))

    def _reply(self, endpoint: str, message: msgspec.Struct) -> None:
        if self.registry.allowed(endpoint):
            push = self.process.push(endpoint)
            push.send(message)
            push.close(linger_ms=1000)

    def _broadcast(self) -> None:
        self._changed = False
        message = self.registry.message(self.core.load(), self._model)
        for link in self._links.values():
            link.send(message)

    def beat(self) -> None:
        """Every heartbeat interval: silent members leave, everybody hears the members, the core sees the time."""
        events: list[Event] = [Tick()]
        for peer in self.registry.silent(self._now_s()):
            self.registry.remove(peer.incarnation)
            events += self._on_left(peer, "went silent")
        self._handle(events)
        load = self.core.load()
        values = checked(self.core.metrics() | self.process.usage())
        self.registry.update_own("ready", load.steps, None, values)
        self._broadcast()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def serve(process: Process) -> None:
    """Until SIGTERM. Tokenizers hand open requests to the next scheduler, so there is nothing to wait for."""
    config = process.config
    core = SchedulerCore(config.scheduler, config.kv, process.incarnation, config.links.recover_s)
    scheduler = SchedulerProcess(process, core)
    gc.freeze()
    gc.set_threshold(200_000)  # ended sequences are freed without it; a full collection costs milliseconds of a step
    scheduler.inbox.start(scheduler.receive)
    while not process.stopping.is_set():
        scheduler.beat()
        try:
            await asyncio.wait_for(process.stopping.wait(), process.config.links.heartbeat_s)
        except TimeoutError:
            continue
    scheduler.inbox.close()

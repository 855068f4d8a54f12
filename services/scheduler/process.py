"""The scheduler process: sockets and membership around the pure fleet. The only file of the scheduler that awaits.

Every wake-up turns all frames that have arrived into one list of events, calls the fleet once, sends what it returns.
Owns the registry and the links; the fleet owns requests and blocks. A worker's group is named by its incarnation.
"""

import asyncio
import gc
import logging
import time

import msgspec

from common import config as configuration
from common.lifecycle import Process
from common.log import follow
from common.membership import MOST_SCHEDULERS
from common.metrics import checked
from common.protocol import (
    Abort,
    Admit,
    Control,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Members,
    ModelFacts,
    Pause,
    Peer,
    Schedulers,
    State,
    Status,
    StatusQuery,
    StepResult,
    Stop,
    Story,
    StoryQuery,
    ToScheduler,
    WorkerReady,
)
from common.pulse import Pulses
from common.recorder import Kind
from common.transport import AsyncInbox, Push, scheduler_endpoint
from services.scheduler import process_traces
from services.scheduler.blocks import chain_root
from services.scheduler.events import (
    ApiLost,
    Effect,
    FleetEvent,
    Flush,
    GroupJoined,
    GroupLost,
    GroupReady,
    GroupRefused,
    GroupResult,
    SendPlan,
    SendRefused,
    SendTokens,
    Tick,
    TokenizerLost,
    WorkerFault,
)
from services.scheduler.fleet import Fleet
from services.scheduler.journal import Journal
from services.scheduler.members import Registry, without_figures
from services.scheduler.process_kv_events import Publisher

log = logging.getLogger("scheduler")
DRAIN_LOOK_S = 0.1
FAREWELL_MS = 1000  # the last word to a process that has departed may wait so long for a full link


class SchedulerProcess:
    def __init__(self, process: Process, fleet: Fleet) -> None:
        self.process = process
        self.fleet = fleet
        self.recorder = process.recorder
        fleet.tell(Journal(process.recorder).note)
        links = process.config.links
        endpoint = scheduler_endpoint(process.config, process.instance)
        self.inbox: AsyncInbox[ToScheduler] = AsyncInbox(endpoint, ToScheduler, links.queue, process.counters)
        # With keys, peers on other hosts are known; without, only this host is looked at.
        tcp_root = "tcp://" if links.keys_dir or links.insecure_tcp else f"tcp://{links.host}:"
        root = f"ipc://{process.config.run_dir}/" if links.transport == "ipc" else tcp_root
        self.registry = Registry(process.peer(self.inbox.endpoint), (root,), links.dead_after_s, process.beat_gap_s)
        self.pulses = Pulses(process.beat_gap_s)
        self.pulses.add(fleet.work)
        self.fingerprint = configuration.fingerprint(process.config)
        self._links: dict[int, Push] = {}  # by incarnation
        self._tokenizers: dict[int, Push] = {}  # by instance
        self._changed = False  # members changed since the last broadcast
        self._schedulers = process.config.services.scheduler.replicas  # that there should be
        self._asked = Control()  # by administrators so far
        self.publisher: Publisher | None = None  # of KV events
        if kv_log := fleet.book.kv_log:
            plain_root = chain_root("", process.incarnation)
            self.publisher = Publisher(process.config.kv, process.instance, kv_log, plain_root)

    def receive(self, batch: list[tuple[int, ToScheduler]]) -> None:
        """All frames of one wake-up, in order."""
        events: list[FleetEvent] = []
        for sender, message in batch:
            if isinstance(message, StepResult):
                events.append(GroupResult(sender, message))
            elif isinstance(message, Admit | Abort | Stop):
                # An API gives up by itself what no tokenizer has.
                service = self.registry.service_of(sender)
                if service == "tokenizer" or (service == "api" and isinstance(message, Abort)):
                    events.append(message)
            elif isinstance(message, Pause):
                if self.registry.service_of(sender) == "api":
                    events.append(message)
            else:
                events += self._control(sender, message)
        self._handle(events)
        if self._changed:
            self._broadcast()
        self._tell()

    def _tell(self) -> None:
        """Whoever watches from outside, after everything else."""
        if self.publisher:
            self.publisher.publish()
        past = self.fleet.book.past
        if past.traced:
            traced, past.traced = past.traced, []
            if self.process.spans:
                process_traces.tell(self.process.spans, traced)

    def _control(self, sender: int, message: ToScheduler) -> list[FleetEvent]:
        now_s = self._now_s()
        match message:
            case Heartbeat():
                self._changed |= self.registry.heartbeat(sender, message, now_s)
            case Hello():
                return self._on_hello(sender, message, now_s)
            case Goodbye():
                peer = self.registry.remove(sender)
                return self._on_left(peer, "left", died=False) if peer else []
            case WorkerReady():
                if self.registry.service_of(sender) == "worker":
                    return [GroupReady(sender, message)]
            case Schedulers(count) if 1 <= count <= MOST_SCHEDULERS:
                self._changed |= count != self._schedulers
                self._schedulers = count
            case Control() if self.registry.service_of(sender) == "api":
                return self._on_control(message)
            case StatusQuery(reply_to):
                status = Status(self.registry.members(), self.fleet.load(), self.fleet.model, self._schedulers)
                self._reply(reply_to, status)
            case StoryQuery(reply_to, seq_id):
                self._reply(reply_to, Story(self.fleet.story(seq_id)))
        return []

    def _on_control(self, asked: Control) -> list[FleetEvent]:
        """What is asked for stays so until it is asked for anew, also for who joins later."""
        profile = self._asked.profile if asked.profile is None else asked.profile
        self._asked = Control(False, asked.log_level or self._asked.log_level, profile)
        follow(asked.log_level)
        self._changed = True
        return [Flush()] if asked.flush else []

    def _on_hello(self, sender: int, hello: Hello, now_s: float) -> list[FleetEvent]:
        joined, replaced = self.registry.hello(sender, hello, now_s)
        events = self._on_left(replaced, "was replaced") if replaced else []
        if joined:
            log.info("%s-%d joined (pid %d)", joined.service, joined.instance, joined.pid)
            self.recorder.peers([joined], ())
            if hello.config_hash != self.fingerprint:
                log.warning("%s-%d runs with other settings than the scheduler", joined.service, joined.instance)
            self._links[sender] = self.process.push(joined.endpoint)
            if joined.service == "tokenizer":
                self._tokenizers[joined.instance] = self._links[sender]
        self._changed = True
        return events

    def _on_left(self, peer: Peer, how: str, died: bool = True) -> list[FleetEvent]:
        log.info("%s-%d %s", peer.service, peer.instance, how)
        self.recorder.peers((), [peer], how)
        self._changed = True
        self.inbox.departed = self.registry.departed
        if link := self._links.pop(peer.incarnation, None):
            # It may still run: it then reads that it is given up, and ends.
            link.send(without_figures(self._members()))
            link.close(linger_ms=FAREWELL_MS)
        if peer.service == "api":
            return [ApiLost(peer.instance)]
        if peer.service == "tokenizer":
            self._tokenizers.pop(peer.instance, None)
            return [TokenizerLost(peer.instance)]
        return [GroupLost(peer.incarnation, how, died)] if peer.service == "worker" else []

    def _handle(self, events: list[FleetEvent]) -> None:
        if not events:
            return
        for effect in self.fleet.handle(events, self._now_s()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendPlan(plan, group):
                self._links[group].send(plan)
                self.recorder.steps.add(Kind.PLANNED, 0, plan.step, len(plan.slots) // 4, len(plan.added))
            case SendTokens(tokenizer, batch):
                if link := self._tokenizers.get(tokenizer):
                    link.send(batch)
            case SendRefused(tokenizer, refused):
                self.recorder.refusals.add(Kind.REFUSED, refused.seq_id, text=refused.reason.encode())
                if link := self._tokenizers.get(tokenizer):
                    link.send(refused)
            case GroupJoined(group, model):
                self._on_joined(group, model)
            case GroupRefused(group, reason):
                if self.registry.judge(group, "failed"):  # it goes on asking
                    self._changed = True
                    log.error("%s is not used: %s", self.registry.name(group), reason)
            case WorkerFault(reason, group):
                log.error("%s is given up: %s", self.registry.name(group), reason)
                if peer := self.registry.remove(group):
                    self._handle(self._on_left(peer, "was given up"))

    def _on_joined(self, group: int, model: ModelFacts) -> None:
        self._changed |= self.registry.judge(group, "ready")
        ours = self.fleet.model
        if ours and (ours.dtype, ours.ops_hash, ours.kv_dtype) != (model.dtype, model.ops_hash, model.kv_dtype):
            name = self.registry.name(group)
            log.warning("%s has other number types or kernels: what moves to it may change its words", name)

    def _reply(self, endpoint: str, message: msgspec.Struct) -> None:
        if self.registry.allowed(endpoint):
            push = self.process.push(endpoint)
            push.send(message)
            push.close(linger_ms=1000)

    def _broadcast(self) -> None:
        self._changed = False
        message = self._members()
        lean = without_figures(message)
        for incarnation, link in self._links.items():
            link.send(message if self.registry.service_of(incarnation) == "api" else lean)

    def _members(self) -> Members:
        message = self.registry.message(self.fleet.load(), self.fleet.model, self._schedulers)
        return msgspec.structs.replace(message, log_level=self._asked.log_level, profile=bool(self._asked.profile))

    def beat(self) -> None:
        """Every heartbeat interval: silent members leave, everybody hears the members, the fleet sees the time.

        After a time in which this process was stopped nobody is judged before what has come meanwhile was read.
        """
        now_s = self._now_s()
        if self.registry.rhythm.steady(now_s):
            events: list[FleetEvent] = [Tick()]
            for peer in self.registry.silent(now_s):
                self.registry.remove(peer.incarnation)
                events += self._on_left(peer, "went silent")
            self._handle(events)
            self._tell()
        for group, load in self.fleet.loads().items():
            self.registry.tell_figures(group, group_figures(load))
        load = self.fleet.load()
        leaves = self.process.stopping.is_set() or self.process.instance >= self._schedulers
        state: State = "draining" if leaves else "ready"
        self.process.record_beat(state)
        values = checked(self.fleet.metrics() | self.process.usage() | self.pulses.figures(now_s))
        self.registry.update_own(state, load.steps, values, self.fleet.book.past.figures.packed())
        self._broadcast()

    @property
    def has_siblings(self) -> bool:
        return self._schedulers > 1 or self.process.instance >= self._schedulers

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def group_figures(load: Load) -> dict[str, float]:
    """By the names of common/metrics.py."""
    return {
        "group_running": float(load.running),
        "group_waiting": float(load.waiting),
        "group_blocks": float(load.blocks_total),
        "group_blocks_free": float(load.blocks_free),
        "group_blocks_cached": float(load.blocks_cached),
    }


async def serve(process: Process) -> None:
    """Until SIGTERM. Tokenizers hand open requests to the next scheduler, so a lone one has nothing to wait for.

    Where there are others, tokenizers move what is open as soon as they hear that this one drains.
    """
    config = process.config
    fleet = Fleet(config.scheduler, config.kv, process.incarnation, config.links.recover_s)
    scheduler = SchedulerProcess(process, fleet)
    gc.freeze()
    gc.set_threshold(200_000)  # ended sequences are freed without it; a full collection costs milliseconds of a step
    scheduler.inbox.start(scheduler.receive)
    while not process.stopping.is_set():
        scheduler.beat()
        try:
            await asyncio.wait_for(process.stopping.wait(), process.config.links.heartbeat_s)
        except TimeoutError:
            continue
    deadline_s = time.monotonic() + min(config.links.drain_s, config.links.dead_after_s)
    while scheduler.has_siblings and not fleet.idle and time.monotonic() < deadline_s:
        scheduler.beat()
        await asyncio.sleep(min(DRAIN_LOOK_S, config.links.heartbeat_s))
    scheduler.inbox.close()
    if scheduler.publisher:
        scheduler.publisher.close()

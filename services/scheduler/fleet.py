"""All worker groups of one scheduler: events in, effects out. No I/O, no clock, no randomness.

`Fleet.handle` is the only mutator. It owns the cores, one per group that can run plans, and with them which sequence
lives where: in exactly one core. While no group is there, the core of the last one, without its worker, is the lobby
in which sequences wait. Requests that come before the first group are kept unread: nothing is known about the model.
Groups of another model are refused. A group that goes leaves its sequences to the others, with all output so far; what
its worker still sends is nobody's.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from common.config import Kv, Scheduler
from common.protocol import Abort, Admit, Load, ModelFacts, Pause, Stop, WorkerReady
from services.scheduler import admission, moves, places, router
from services.scheduler.blocks import TOKEN_BYTES, chain_root
from services.scheduler.book import Book
from services.scheduler.core import COUNTERS, SchedulerCore
from services.scheduler.early import Early
from services.scheduler.events import (
    ApiLost,
    Drain,
    Effect,
    FleetEvent,
    Flush,
    GroupJoined,
    GroupLost,
    GroupReady,
    GroupRefused,
    GroupResult,
    SendPlan,
    Tick,
    TokenizerLost,
    WorkerFault,
    WorkerLost,
)
from services.scheduler.kv_events import KvLog
from services.scheduler.request import Journal


def difference(ours: ModelFacts, theirs: ModelFacts) -> str:
    """What makes them different models; empty if sequences may move from one to the other."""
    names = ("name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "block_tokens", "groups")
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return ", ".join(f"{name} {theirs!r} instead of {ours!r}" for name, ours, theirs in pairs if ours != theirs)


class Fleet:
    """`seed` (64 bits) keys the prefix caches' hashes; draw it per process.

    `recover_s`: how long a sequence that has lost its tokenizer, and sequences whose last group has gone, wait for
    another tokenizer, and for a group of the same model rather than of another one.
    """

    def __init__(self, limits: Scheduler, kv: Kv, seed: int = 0, recover_s: float = 30.0) -> None:
        self.book = Book()
        self.book.kv_log = KvLog() if kv.events_endpoint else None
        self._new_core = partial(SchedulerCore, limits, kv, seed, recover_s, self.book)
        self._seed, self._recover_s, self._max_waiting = seed, recover_s, limits.max_waiting
        self._groups: dict[int, SchedulerCore] = {}
        self._lobby = self._new_core()  # its sequences wait; used while there are no groups
        self._empty_since_s = 0.0
        self._early: Early | None = Early(2 * limits.max_waiting)  # None once there was a group
        self._arrivals = 0
        self._past_steps = 0  # of groups that have gone
        self._draining = False
        self._now_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            GroupResult: self._on_result,
            Admit: self._on_admit,
            Abort: self._on_named,
            Stop: self._on_named,
            Pause: self._on_named,
            GroupReady: self._on_ready,
            GroupLost: self._on_lost,
            TokenizerLost: self._on_peer_lost,
            ApiLost: self._on_peer_lost,
            Drain: self._on_drain,
            Flush: self._on_drain,
            Tick: self._on_tick,
        }

    def handle(self, events: Iterable[FleetEvent], now_s: float) -> list[Effect]:
        """Applies events in order, then plans as many steps as each group may have in flight."""
        self._now_s = now_s
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        plans: list[Effect] = []
        for group, core in self._groups.items():
            if core.changed:
                plans += [SendPlan(plan, group) for plan in core.plans()]
        return plans + self.book.drain()

    def tell(self, journal: Journal) -> None:
        """Each event of a sequence's story also goes there, from now on."""
        self.book.past.journal = journal

    @property
    def model(self) -> ModelFacts | None:
        """What the groups serve; None while there are none."""
        for core in self._groups.values():
            worker = core.state.worker
            return worker.facts if worker else None
        return None

    @property
    def idle(self) -> bool:
        """Nothing is open: a draining scheduler may leave."""
        return not (self._early and self._early.events) and all(core.idle for core in self._cores())

    def work(self) -> tuple[int, int]:
        """Sequences for which a plan is due, and plans made, as `Pulse` wants them."""
        owed, done = zip(*(core.work() for core in self._cores()), strict=True)
        return sum(owed), sum(done) + self._past_steps

    def metrics(self) -> dict[str, float]:
        """Figures of all groups together, by the names of common/metrics.py."""
        return {name: float(self.book.counters[name]) for name in (*COUNTERS, "moved")} | {
            "open_requests": float(sum(len(core.state.sequences) for core in self._cores())),
            "steps": float(self.load().steps),
        }

    def load(self) -> Load:
        """Of all groups together."""
        return places.together([core.load() for core in self._cores()], self._past_steps)

    def loads(self) -> dict[int, Load]:
        """By group."""
        return {group: core.load() for group, core in self._groups.items()}

    def story(self, seq_id: int) -> list[str]:
        """What happened to a sequence, oldest first; empty if it is unknown or long forgotten."""
        return (self._home(seq_id) or next(self._cores())).story(seq_id)

    def check(self) -> None:
        """Recomputes all invariants. Raises AssertionError."""
        seen: dict[int, SchedulerCore] = {}
        for core in self._cores():
            core.check()
            assert core.state.ready == (core is not self._lobby), "a group has no worker, or the lobby has one"
            for seq_id, sequence in core.state.sequences.items():
                assert seq_id not in seen, f"in two groups\n{core.story(seq_id)}"
                seen[seq_id] = core
                assert sequence.key[-1] < self._arrivals, "a later sequence could get the same key"
        assert not self._groups or self._lobby.idle, "sequences wait in the lobby though there are groups"
        assert self._early is None or not self._groups, "early requests are kept though there is a group"

    def _cores(self) -> Iterator[SchedulerCore]:
        """All in which sequences may be."""
        return iter(self._groups.values() if self._groups else (self._lobby,))

    def _home(self, seq_id: int) -> SchedulerCore | None:
        """Where a sequence lives that is, or was once, known by this id."""
        name = self.book.past.name(seq_id)
        return next((core for core in self._cores() if name in core.state.sequences), None)

    # Requests

    def _on_named(self, event: Abort | Stop) -> None:
        """About one sequence. If nobody has it, any core will count that."""
        if self._early is not None:
            self._early.add(event)
            return
        core = self._home(event.seq_id) or next(self._cores())
        core.apply(event, self._now_s)

    def _on_admit(self, admit: Admit) -> None:
        if self._early is not None and not admit.attach:  # nothing runs yet that somebody could go on with
            if refusal := self._early.add(admit):
                self.book.effects.append(refusal)
            return
        if len(self._groups) <= 1:
            self._admit(next(self._cores()), admit)
        elif (core := self._known(admit)) is not None:
            self._admit(core, admit)
        else:
            root = chain_root(admit.cache_salt, self._seed)
            chain: list[bytes] = []
            core = self._route(admit, root, chain)
            self._admit(core, admit)
            places.lend_chain(core.state, admit.seq_id, root, chain)

    def _admit(self, core: SchedulerCore, admit: Admit) -> None:
        """Arrivals are counted for all groups together: a sequence keeps its place wherever it goes."""
        core.state.waiting.arrivals = self._arrivals
        core.apply(admit, self._now_s)
        self._arrivals = core.state.waiting.arrivals

    def _known(self, admit: Admit) -> SchedulerCore | None:
        """Where (some of) the request's sequences are already."""
        if admit.origin >= 0 and (core := self._home(admit.origin)):
            return core
        choices = range(min(max(admit.n, 1), self._max_waiting))
        return next((core for choice in choices if (core := self._home(admit.seq_id + choice))), None)

    def _route(self, admit: Admit, root: bytes, chain: list[bytes]) -> SchedulerCore:
        cores = list(self._groups.values())
        tokens = admit.tokens + admit.output
        output = router.expected_output(admit.sampling.max_tokens, len(admit.output) // TOKEN_BYTES)
        wanted = len(tokens) // TOKEN_BYTES + output
        seen = [places.of_tokens(core.state, tokens, wanted, root, chain) for core in cores]
        num_prompt = len(admit.tokens) // TOKEN_BYTES
        full = [bool(admission.lack_of_room(core.state, admit.n, num_prompt)) for core in cores]
        offers = [place._replace(full=is_full) for place, is_full in zip(seen, full, strict=True)]
        return cores[router.choose(offers, output)]

    # Groups

    def _on_result(self, event: GroupResult) -> None:
        core = self._groups.get(event.group)
        if core is None:
            self.book.counters["unknown_results"] += 1
            return
        core.apply(event.result, self._now_s)
        if not core.state.ready:
            self._fell(event.group)

    def _on_ready(self, event: GroupReady) -> None:
        group, ready = event.group, event.ready
        if group in self._groups:
            return  # a repeat
        if reason := self._objection(ready):
            self.book.effects.append(GroupRefused(group, reason))
            return
        core = self._new_core() if self._groups else self._lobby
        core.state.draining = self._draining
        core.apply(ready, self._now_s)
        if not core.state.ready:
            self._tag_faults(group)
            return
        if core is self._lobby:
            self._lobby = self._new_core()
        self._groups[group] = core
        self.book.effects.append(GroupJoined(group, ready.model))
        early, self._early = self._early, None
        for waiting in early.events if early else ():
            self._handlers[type(waiting)](waiting)
        moves.balance(list(self._groups.values()), self._now_s)

    def _objection(self, ready: WorkerReady) -> str:
        """Why this group cannot be used now; empty if it can."""
        if (ours := self.model) is not None:
            found = difference(ours, ready.model)
            return f"another model than that of the other groups: {found}" if found else ""
        worker = self._lobby.state.worker
        found = difference(worker.facts, ready.model) if worker else ""
        if not found or self._lobby.idle:
            return ""
        wait_s = self._empty_since_s + self._recover_s - self._now_s
        if wait_s > 0:
            return f"requests wait {wait_s:.1f} s more for their own model before this one replaces it: {found}"
        places.end_begun(self._lobby.state, f"the model was replaced while this request ran: {found}")
        return ""

    def _on_lost(self, event: GroupLost) -> None:
        core = self._groups.get(event.group)
        if core is not None:
            core.apply(WorkerLost(event.reason, event.died), self._now_s)
            self._fell(event.group)

    def _fell(self, group: int) -> None:
        """The group's core has lost its worker: its sequences, all without rows now, go to other groups."""
        self._tag_faults(group)
        core = self._groups.pop(group)
        if not self._groups:
            self._lobby, self._empty_since_s = core, self._now_s
            return
        self._past_steps += core.load().steps
        moves.empty(core, list(self._groups.values()), self._now_s)

    def _tag_faults(self, group: int) -> None:
        effects = self.book.effects
        for idx, effect in enumerate(effects):
            if isinstance(effect, WorkerFault) and effect.group < 0:
                effects[idx] = WorkerFault(effect.reason, group)

    # All

    def _on_peer_lost(self, event: TokenizerLost | ApiLost) -> None:
        if self._early is not None:
            self._early.add(event)
        for core in self._cores():
            core.apply(event, self._now_s)

    def _on_drain(self, event: Drain | Flush) -> None:
        self._draining |= isinstance(event, Drain)
        for core in self._cores():
            core.apply(event, self._now_s)

    def _on_tick(self, event: Tick) -> None:
        for group, core in list(self._groups.items()) or [(-1, self._lobby)]:
            core.apply(event, self._now_s)
            if group in self._groups and not core.state.ready:
                self._fell(group)
        moves.balance(list(self._groups.values()), self._now_s)

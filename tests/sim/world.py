"""One simulated life of the real fleet of scheduler cores: random load, fake workers, faults, and the invariants.

Everything follows from the seed. Worker groups join, leave, die and are replaced; each has its own link, so deliveries
of different groups come in any order, any message may come twice, and results of dead groups come late. After every
call `check()` runs; at the end each accepted sequence must have had exactly one terminal, and exactly the tokens that
it gives when it runs alone.
"""

import hashlib
from dataclasses import dataclass, field
from random import Random

import msgspec

from common import kv_needs
from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.logprobs import Report
from common.pooling import MODES, Embedding, Pooling
from common.protocol import (
    Abort,
    Admit,
    FinishReason,
    KvGroup,
    ModelFacts,
    Pause,
    Sampling,
    StepResult,
    Stop,
    TokenBatch,
    WorkerReady,
    api_of,
    make_seq_id,
    tokenizer_of,
)
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
from services.scheduler.policy import Key
from services.scheduler.request import Stage
from services.scheduler.tenants import Tenant
from tests.kv_index import KvIndex
from tests.sim.fake_worker import FakeWorker
from tests.sim.language import Stream

VOCAB = 61
EOS = (2, 7)
GARBAGE_API = 3
RECOVER_S = 0.03  # 30 calls
LONG_S = 3600.0  # beyond every deadline of a step


@dataclass
class Client:
    """What the outside knows of one admitted sequence."""

    seq_id: int
    key: tuple[int, int]
    alone: Stream
    tokens: list[int] = field(default_factory=list)
    vector: bytes = b""
    reason: FinishReason | None = None
    may_end: set[FinishReason] = field(default_factory=set)  # besides the end it has alone
    admit: Admit | None = None  # of this choice alone
    heir: "Client | None" = None  # the same choice with another tokenizer
    heard: bool = False
    checked: bool = False
    begun_with: int = 0  # tokens of the takeover, where it still ran


class World:
    """A scenario drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        block_tokens = random.choice((1, 2, 3, 4, 8))
        self.max_len = random.randint(12, 48)
        fewest = -(-self.max_len // block_tokens)
        parity = random.choice((0, 1, 5, 1000))
        self.facts = ModelFacts(
            "fake",
            "fake",
            VOCAB,
            self.max_len,
            EOS,
            block_tokens,
            fewest,
            attention_parity=parity,
            drafts=random.choice((0, 0, 1, 2, 3, 8)),
            draft_rows=random.choice((1, 4, 100)),
            embedding=Embedding(2),
        )
        if random.random() < 0.7:
            self._draw_groups()
        self.most_groups = random.choice((1, 2, 2, 3, 4))
        self.uneven = random.random() < 0.15  # groups may be too small for the longest sequences
        self.limits = Scheduler(
            policy=random.choice(("decode_first", "decode_first", "prefill_first")),
            max_rows=random.randint(1, 9),
            step_tokens=random.choice((1, 3, 8, 16, 64)),
            chunk_tokens=random.choice((0, 0, 1, 5)),
            max_waiting=random.choice((6, 100)),
            plans_in_flight=random.choice((1, 2, 2, 3, 6)),
            max_worker_deaths=random.choice((1, 2, 4)),
            max_waiting_tokens=random.choice((0, 0, 30)),
            priority_ageing_s=random.choice((0.0, 0.02, 30.0)),
            chunk_context=random.choice((0, 1, 4)),
            chunk_beside=random.choice((0, 2, 7, 512)),
        )
        kv = Kv(prefix_cache=random.random() < 0.8, events_endpoint="tcp://*:5557")  # which nothing here binds
        self.fleet = Fleet(self.limits, kv, seed, RECOVER_S)
        self.index = KvIndex()
        self.workers: dict[int, FakeWorker] = {}  # by group
        self.num_groups = 0  # that have ever been
        self.late: list[FleetEvent] = []  # still on the way from groups that have gone
        self.doubles: list[FleetEvent] = []  # have been delivered, and may come again
        self.salts: dict[int, int] = {}
        self.clients: dict[int, Client] = {}
        self.refused: set[int] = set()
        self.admitted: list[Admit] = []
        self.handled = 0  # of them
        self.spoilt: set[int] = set()  # groups whose results the core must reject
        self.paused: list[int] = []  # ids, some of which have ended
        self.orderly = True  # nobody was sent back to the queue by the last call
        self.trace = hashlib.blake2b(digest_size=16)
        self.now_s = 0.0

    def _draw_groups(self) -> None:
        """Kinds of layers in any mixture; pools are shared or not, also by blocks of unlike kinds."""
        random, block_tokens = self.random, self.facts.block_tokens
        most = random.choice((1, 2, 3))
        groups: list[KvGroup] = []
        for number in range(random.randint(1, 4)):
            kind = random.choice(("full", "window", "window", "state") if number else ("full", "full", "window"))
            pool = random.randint(0, min(max((group.pool for group in groups), default=-1) + 1, most - 1))
            window = random.choice((1, 2, 5, 9, 30)) if kind == "window" else 0
            every = block_tokens * random.randint(1, 3) if kind == "state" else 0
            groups.append(KvGroup(kind, pool, window, every))
        needed = kv_needs.needs(groups, 1 + max(group.pool for group in groups), self.max_len, block_tokens)
        self.facts = msgspec.structs.replace(
            self.facts, groups=tuple(groups), num_blocks=needed[0], pools=tuple(needed[1:])
        )

    def run(self, actions: int = 250) -> str:
        """The whole scenario; returns the trace's hash."""
        rates = self._rates()
        for _ in range(actions):
            names = self.random.choices(list(rates), list(rates.values()), k=self.random.choice((1, 1, 2, 4)))
            if "hang" in names:
                names = ["hang"]  # nothing that is on its way may come too late
            names.sort(key=lambda name: name != "foreign_group")  # while the other groups are there
            self._handle(self._uncrossed([event for name in names for event in getattr(self, f"_{name}")()]))
        self._drain()
        self._check_end()
        return self.trace.hexdigest()

    def _rates(self) -> dict[str, float]:
        slow = self.random.choice((2.0, 10.0, 40.0))
        calm = self.random.random() < 0.3
        faults = 0.0 if calm else 0.3
        return {
            "admit": self.random.choice((2.0, 6.0, 12.0)),
            "work": slow,
            "deliver": slow,
            "abort": 0.0 if calm else 1.0,
            "stop": 0.0 if calm else 0.7,
            "tick": 0.5,
            "garbage": 1.0,
            "repeat": 0.5,
            "lose_group": faults,
            "leave_group": faults,
            "join_group": 2.0,
            "foreign_group": faults,
            "late": 1.0,
            "double": 1.0,
            "hang": faults / 2,
            "fail_step": faults,
            "fail_rows": faults,
            "bad_result": faults,
            "lose_peer": faults / 3,
            "take_over": faults * 2,
            "pause": 0.0 if calm else 0.7,
            "resume": 1.0,
            "flush": faults / 2,
        }

    def _admit(self) -> list[FleetEvent]:
        random = self.random
        counter = len(self.admitted) * 4
        seq_id = make_seq_id(random.randint(0, 1), random.randint(0, 2), 77, counter)
        salt = random.choice((0, 0, 0, 1))
        num_prompt = random.randint(1, self.max_len - 1) if random.random() < 0.4 else random.randint(1, 10)
        # Few different beginnings make prefix hits and near misses.
        beginning = Random(random.randint(0, 2)).choices(range(VOCAB), k=num_prompt)
        own = random.randint(0, num_prompt)
        prompt = beginning[:own] + random.choices(range(VOCAB), k=num_prompt - own)
        sampling = Sampling(
            max_tokens=random.choice((1, 2, 5, 20, 100)),
            seed=random.choice((0, 5, 2**64 - 1)),
            ignore_eos=random.random() < 0.3,
            min_tokens=random.choice((0, 0, 3)),
            stop_token_ids=random.choice(((), (), (9, 11), (2, 900, -4))),
        )
        n = random.choice((1, 1, 1, 2, 4))
        admit = Admit(seq_id, pack_i32(prompt), sampling, n, random.choice((0, 0, 0, 1, -3)), "s" * salt)
        tenant, weight = random.choice((("", 1), ("ann", 3), ("bob", random.choice((1, 5)))))
        admit = msgspec.structs.replace(admit, tenant=tenant, weight=weight)
        if n == 1 and random.random() < 0.1:
            admit = self._with_output(admit, prompt, salt)
        elif n == 1 and random.random() < 0.2:
            report = Report(pooling=Pooling(random.choice(MODES)))
            admit = msgspec.structs.replace(admit, sampling=Sampling(0, report=report))
        self._expect(admit, prompt, salt)
        return [admit]

    def _with_output(self, admit: Admit, prompt: list[int], salt: int) -> Admit:
        """As after a scheduler's restart: an unfinished part of the stream has already been delivered."""
        alone = Stream.alone(prompt, salt, admit.sampling, self.max_len, VOCAB, EOS)
        output = alone.tokens[: self.random.randrange(len(alone.tokens))]
        return msgspec.structs.replace(admit, output=pack_i32(output))

    def _expect(self, admit: Admit, prompt: list[int], salt: int) -> None:
        self.admitted.append(admit)
        for choice in range(admit.n):
            seed = (admit.sampling.seed + choice) % 2**64
            sampling = msgspec.structs.replace(admit.sampling, seed=seed)
            alone = Stream.alone(prompt, salt, sampling, self.max_len, VOCAB, EOS)
            seq_id = admit.seq_id + choice
            self.salts[seq_id] = salt
            key = (admit.priority, len(self.clients))
            client = self.clients[seq_id] = Client(seq_id, key, alone, list(unpack_i32(admit.output)))
            client.admit = msgspec.structs.replace(
                admit, seq_id=seq_id, n=1, sampling=sampling, output=b"", origin=seq_id
            )

    def _busy(self) -> tuple[int, FakeWorker] | None:
        """A group with a plan to run."""
        busy = [(group, worker) for group, worker in self.workers.items() if worker.plans]
        return self.random.choice(busy) if busy else None

    def _done(self) -> tuple[int, FakeWorker] | None:
        """A group with a result on its link."""
        done = [(group, worker) for group, worker in self.workers.items() if worker.results]
        return self.random.choice(done) if done else None

    def _work(self) -> list[FleetEvent]:
        if found := self._busy():
            found[1].step(fails=False)
        return []

    def _fail_step(self) -> list[FleetEvent]:
        if found := self._busy():
            found[1].step(fails=True)
            for client in self._open():
                client.may_end.add(FinishReason.ERROR)
        return []

    def _fail_rows(self) -> list[FleetEvent]:
        """The device has no memory for some rows of a step, however small the pieces."""
        if found := self._busy():
            worker = found[1]
            slots = unpack_i32(worker.plans[0].slots)
            failed = self.random.sample(range(len(slots)), self.random.randint(1, len(slots)))
            worker.step(fails=False, failed=failed)
            for place in failed:
                if client := self.clients.get(worker.rows[slots[place]].seq_id):  # shares its ends with its heir
                    client.may_end.add(FinishReason.ERROR)
        return []

    def _deliver(self) -> list[FleetEvent]:
        found = self._done()
        if not found:
            return []
        group, worker = found
        result = worker.results.popleft()
        if result.error or result.failed:
            worker.unheard_failures -= 1
            worker.excused_until = worker.plans[-1].step if worker.plans else worker.last_step
        return [self._remember(GroupResult(group, result))]

    def _remember(self, event: FleetEvent) -> FleetEvent:
        self.doubles = [*self.doubles[-20:], event]
        return event

    def _double(self) -> list[FleetEvent]:
        """A message comes a second time, at any time later."""
        return [self.random.choice(self.doubles)] if self.doubles else []

    def _late(self) -> list[FleetEvent]:
        """Something comes from a group that has gone: results that were on the way, or that it sent even later."""
        return [self.late.pop(self.random.randrange(len(self.late)))] if self.late else []

    def _open(self) -> list[Client]:
        return [client for client in self.clients.values() if client.reason is None and client.heir is None]

    def _abort(self) -> list[FleetEvent]:
        return self._end(Abort, FinishReason.ABORT)

    def _stop(self) -> list[FleetEvent]:
        return self._end(Stop, FinishReason.STOP_STRING)

    def _end(self, kind: type[Abort] | type[Stop], reason: FinishReason) -> list[FleetEvent]:
        if not self.clients:
            return []
        client = self.random.choice(list(self.clients.values()))
        client.may_end.add(reason)
        return [kind(client.seq_id)]

    def _pause(self) -> list[FleetEvent]:
        """A client stops reading, whether there is anything left to read or not."""
        if not self.clients:
            return []
        admit = self.random.choice(list(self.clients.values())[-12:]).admit
        assert admit is not None
        self.paused.append(admit.origin)
        return [Pause(self.paused[-1], True)]

    def _resume(self) -> list[FleetEvent]:
        if not self.paused:
            return []
        return [Pause(self.paused.pop(self.random.randrange(len(self.paused))), False)]

    def _tick(self) -> list[FleetEvent]:
        return [Tick()]

    def _flush(self) -> list[FleetEvent]:
        return [Flush()]

    def _repeat(self) -> list[FleetEvent]:
        known = [admit for admit in self.admitted[: self.handled] if admit.seq_id not in self.refused]
        return [self.random.choice(known)] if known else []

    def _garbage(self) -> list[FleetEvent]:
        random = self.random
        seq_id = make_seq_id(GARBAGE_API, 3, 1, random.getrandbits(32))
        good = Sampling(max_tokens=3)
        return [
            random.choice(
                (
                    Abort(seq_id),
                    Stop(2**64 - 1),
                    Abort(-1),
                    Pause(seq_id, True),
                    Pause(-1, False),
                    GroupResult(random.choice((-1, *self.workers)), StepResult(10**9, b"abc")),
                    GroupResult(random.choice((-1, *self.workers)), StepResult(-1, b"")),
                    Admit(seq_id, b"", good),
                    Admit(seq_id, b"\0\0\0", good),
                    Admit(seq_id, pack_i32((1, VOCAB)), good),
                    Admit(seq_id, pack_i32((1, -1)), good),
                    Admit(seq_id, pack_i32([1] * self.max_len), good),
                    Admit(seq_id, pack_i32((1,)), good, n=0),
                    Admit(seq_id, pack_i32((1,)), good, n=10**12),
                    Admit(seq_id, pack_i32((1,)), Sampling(max_tokens=0)),
                    Admit(seq_id, pack_i32((1,)), Sampling(1, report=Report(pooling=Pooling()))),
                    Admit(seq_id, pack_i32((1,)), Sampling(0, report=Report(pooling=Pooling(dimensions=3)))),
                    Admit(seq_id, pack_i32((1,)), good, output=b"\0"),
                    Admit(-5, pack_i32((1,)), good),
                    Admit(2**64 - 1, pack_i32((1,)), good, n=2),
                )
            )
        ]

    def _lose_group(self) -> list[FleetEvent]:
        if not self.workers:
            return [GroupLost(self.num_groups, "never there")]
        group = self.random.choice(list(self.workers))
        self._let_die(group)
        return [self._remember(GroupLost(group, "killed"))]

    def _leave_group(self) -> list[FleetEvent]:
        """On purpose, which is nobody's fault; results that are on the link have come before."""
        if not self.workers:
            return []
        group = self.random.choice(list(self.workers))
        worker = self.workers[group]
        results: list[FleetEvent] = []
        if not worker.unheard_failures:
            results = [GroupResult(group, result) for result in worker.results]
            worker.results.clear()
        self._go(group)
        return [*results, self._remember(GroupLost(group, "left", died=False))]

    def _hang(self) -> list[FleetEvent]:
        """All workers beat but do not answer: the cores must give up those whose step's deadline has passed."""
        busy = [group for group, worker in self.workers.items() if worker.plans or worker.results]
        if not busy:
            return []
        for group in busy:
            self._let_die(group)
            self.spoilt.add(group)
        self.now_s += LONG_S
        self._handle([Tick()])
        assert not self.spoilt, "a stuck worker was kept"
        return []

    def _let_die(self, group: int) -> None:
        self._go(group)
        for client in self._open():
            client.may_end.add(FinishReason.ERROR)

    def _go(self, group: int) -> None:
        worker = self.workers.pop(group)
        self.late += [GroupResult(group, result) for result in worker.results]
        if worker.plans and self.random.random() < 0.5:
            self.late.append(GroupResult(group, StepResult(worker.plans[0].step, b"", error="nobody hears this")))

    def _join_group(self) -> list[FleetEvent]:
        if len(self.workers) >= self.most_groups:
            return []
        group, rows = self.num_groups, self.random.randint(1, 12)
        self.num_groups += 1
        blocks, *pools = [self._draw_blocks(fewest) for fewest in (self.facts.num_blocks, *self.facts.pools)]
        groups = self.facts.groups or (KvGroup("full"),)
        if kv_needs.longest(groups, (blocks, *pools), self.max_len, self.facts.block_tokens):
            facts = msgspec.structs.replace(self.facts, num_blocks=blocks, pools=tuple(pools))
        else:
            facts = self.facts
        self.workers[group] = FakeWorker(facts, rows, self.limits.step_tokens, self.limits.chunk_tokens, self.salts)
        ready = GroupReady(group, WorkerReady(facts, rows))
        return [ready, ready] if self.random.random() < 0.2 else [ready]

    def _draw_blocks(self, fewest: int) -> int:
        if self.uneven and self.random.random() < 0.4:
            return max(fewest // 2, 1)
        return fewest + self.random.choice((0, 1, fewest // 2, fewest * 2, fewest * 8))

    def _foreign_group(self) -> list[FleetEvent]:
        """Beside the groups that are there no other model may be used."""
        if self.fleet.model is None:
            return []
        change = self.random.choice(({"name": "x"}, {"vocab_size": VOCAB + 1}, {"max_model_len": self.max_len + 1}))
        self.num_groups += 1
        return [GroupReady(-self.num_groups, WorkerReady(msgspec.structs.replace(self.facts, **change), 4))]

    def _bad_result(self) -> list[FleetEvent]:
        """The oldest result of a group, spoilt: the core must give the group up."""
        found = self._done()
        if not found or found[1].unheard_failures:
            return []
        group, worker = found
        result = worker.results.popleft()
        spoilt = self.random.choice((result.tokens + pack_i32((1,)), b"x", pack_i32((VOCAB,)) + result.tokens[4:]))
        self._let_die(group)
        self.spoilt.add(group)
        return [GroupResult(group, StepResult(result.step, spoilt))]

    def _lose_peer(self) -> list[FleetEvent]:
        lost = self.random.choice((ApiLost(1), TokenizerLost(2), ApiLost(200)))
        for client in self._open():
            owner = tokenizer_of(client.seq_id) if isinstance(lost, TokenizerLost) else api_of(client.seq_id)
            if owner == lost.instance:
                client.may_end.add(FinishReason.ABORT)
        return [lost]

    def _take_over(self) -> list[FleetEvent]:
        """The API hands a choice, whether it has ended or not, to another tokenizer."""
        known = [c for c in self.clients.values() if c.heir is None and c.seq_id not in self.refused]
        if not known:
            return []
        client = self.random.choice(known[-8:])
        assert client.admit is not None
        api = api_of(client.seq_id)
        seq_id = make_seq_id(api, self.random.randint(0, 2), 77, len(self.admitted) * 4)
        admit = msgspec.structs.replace(client.admit, seq_id=seq_id)
        self.admitted.append(admit)
        self.salts[seq_id] = self.salts[client.seq_id]
        client.heir = Client(seq_id, client.key, client.alone, may_end=client.may_end, admit=client.admit)
        self.clients[seq_id] = client.heir
        return [admit]

    def _uncrossed(self, events: list[FleetEvent]) -> list[FleetEvent]:
        """Without repeats behind the first group that comes: it may refuse what waited for it, and who repeats what has
        just been refused asks anew (a tokenizer aborts what it has closed)."""
        came = next((i for i, event in enumerate(events) if isinstance(event, GroupReady)), len(events))
        if self.fleet.model is not None:
            return events
        old = {id(admit) for admit in self.admitted[: self.handled]}
        return [event for i, event in enumerate(events) if i < came or id(event) not in old]

    # Effects

    def _handle(self, events: list[FleetEvent]) -> None:
        self.now_s += 0.001
        preemptions = self.fleet.book.counters["preemptions"]
        effects = self.fleet.handle(events, self.now_s)
        if events or effects:  # without any nothing has changed, and to check is half of what a life costs
            self.fleet.check()
            self.index.follow(self.fleet)
        self.orderly = preemptions == self.fleet.book.counters["preemptions"]
        self.handled = len(self.admitted)
        for effect in effects:
            self.trace.update(msgspec.msgpack.encode(effect))
            self._on_effect(effect)
        if not self.workers:
            assert self.fleet.model is None, "the fleet believes in a group that has gone"

    def _on_effect(self, effect: Effect) -> None:
        match effect:
            case SendPlan(plan, group):
                self.workers[group].plans.append(plan)
                self._check_order(group, {added.seq_id for added in plan.added})
            case SendRefused(_, refused):
                self.refused |= {seq_id for seq_id in self.clients if seq_id >> 2 == refused.seq_id >> 2}
            case SendTokens(tokenizer, batch):
                self._on_tokens(tokenizer, batch)
            case WorkerFault(_, group):
                assert group in self.spoilt, "a good worker was given up"
                self.spoilt.remove(group)
            case GroupRefused(group, reason):
                assert group < 0 and "another model" in reason, f"a good group was refused: {reason}"
            case GroupJoined(group):
                assert group >= 0, "a group of another model was taken"

    def _on_tokens(self, tokenizer: int, batch: TokenBatch) -> None:
        seq_ids, first_index = unpack_u64(batch.seq_ids), unpack_i32(batch.first_index)
        for seq_id, index, token in zip(seq_ids, first_index, unpack_i32(batch.tokens), strict=True):
            client = self.clients[seq_id]
            client.heard = True
            assert client.heir is None or not client.heir.heard, f"token after the takeover\n{self.story(seq_id)}"
            assert tokenizer_of(seq_id) == tokenizer, "sent to another tokenizer"
            assert client.reason is None, f"token after the end\n{self.story(seq_id)}"
            assert index == len(client.tokens), f"token {index} after {len(client.tokens)}\n{self.story(seq_id)}"
            client.tokens.append(token)
        self._check_takeover(batch)
        for finished in batch.finished:
            if api_of(finished.seq_id) == GARBAGE_API:
                assert finished.reason is FinishReason.ERROR, "garbage came before the worker and was run"
                continue
            client = self.clients[finished.seq_id]
            assert tokenizer_of(finished.seq_id) == tokenizer, "sent to another tokenizer"
            assert client.reason is None, f"two terminals\n{self.story(finished.seq_id)}"
            client.reason, client.vector = finished.reason, finished.vector

    def _check_takeover(self, batch: TokenBatch) -> None:
        """An heir gets all that was ever said, in its first batch, and its end with it if it had one."""
        ended = {finished.seq_id for finished in batch.finished}
        for old in self.clients.values():
            heir = old.heir
            if heir is not None and not heir.checked and heir.tokens:
                heir.checked = True
                if old.reason is None or old.reason is not FinishReason.ABORT:
                    assert heir.tokens[: len(old.tokens)] == old.tokens, f"not all output\n{self.story(heir.seq_id)}"
                    heir.begun_with = 0 if heir.seq_id in ended else len(old.tokens)

    def _check_order(self, group: int, added: set[int]) -> None:
        """Nobody overtakes within a tenant of a group, but for a head that waits for a sibling with its prompt."""
        if not added or not self.orderly:
            return
        sequences = self.fleet._groups[group].state.sequences
        last: dict[Tenant, Key] = {}
        for seq_id in added:
            if sequence := sequences.get(seq_id):
                last[sequence.tenant] = max(sequence.key, last.get(sequence.tenant, sequence.key))
        for sequence in sequences.values():
            if sequence.stage is Stage.WAITING and sequence.key < last.get(sequence.tenant, sequence.key):
                siblings = [other.row for other in sequence.request.choices if other.row is not None]
                assert siblings, f"overtaken\n{self.story(sequence.seq_id)}"

    # The end

    def _drain(self) -> None:
        """No more load and no more faults: everything must come to its end within a bound."""
        bound = 200 + 4 * sum(len(c.alone.tokens) + self.max_len for c in self._open()) * self.limits.plans_in_flight
        self._handle([Pause(seq_id, False) for seq_id in self.paused])
        for _ in range(bound):
            if self.fleet.idle:
                return
            events = self._join_group() if not self.workers else []
            for _ in range(len(self.workers)):
                self._work()
                events += self._deliver()
            self._handle([*events, Tick()] if self.random.random() < 0.1 else events)
        stuck = [self.story(client.seq_id) for client in self._open() if client.seq_id not in self.refused]
        raise AssertionError("no end within the bound:\n" + "\n".join(stuck))

    def _check_end(self) -> None:
        assert not self.spoilt, "a bad result was accepted"
        load = self.fleet.load()
        assert load.running == load.waiting == 0, "rows are left"
        assert load.blocks_free + load.blocks_cached == load.blocks_total, "blocks are left in use"
        for seq_id, client in self.clients.items():
            if client.heir is not None:
                continue
            if seq_id in self.refused:
                assert client.reason is None, f"refused and ended\n{self.story(seq_id)}"
                continue
            story, alone = self.story(seq_id), client.alone
            assert client.reason is not None, f"no terminal\n{story}"
            tokens = tuple(client.tokens)
            assert tokens == alone.tokens[: len(tokens)], f"{tokens} instead of {alone.tokens}\n{story}"
            if self.uneven and client.reason in (FinishReason.LENGTH, FinishReason.ERROR):
                continue  # its group was too small for it
            assert client.vector == (alone.vector if client.reason is FinishReason.EOS else b""), f"its vector\n{story}"
            if client.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH):
                assert (tokens, client.reason) == (alone.tokens, alone.reason), f"{client} ends too soon\n{story}"
            else:
                assert client.reason in client.may_end, f"{client.reason} without a cause\n{story}"

    def story(self, seq_id: int) -> str:
        return "\n".join(self.fleet.story(seq_id))

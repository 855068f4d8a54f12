"""One simulated life of the real scheduler core: random load, a fake worker, faults, and the invariants.

Everything follows from the seed. After every call `check()` runs; at the end each accepted sequence must have had
exactly one terminal, and exactly the tokens that it gives when it runs alone.
"""

import hashlib
from dataclasses import dataclass, field
from random import Random

import msgspec

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.protocol import (
    Abort,
    Admit,
    FinishReason,
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
from services.scheduler.policy import Key
from services.scheduler.request import Stage
from services.scheduler.tenants import Tenant
from tests.sim.fake_worker import FakeWorker
from tests.sim.language import Stream

VOCAB = 61
EOS = (2, 7)
GARBAGE_API = 3
RECOVER_S = 0.03  # 30 calls


@dataclass
class Client:
    """What the outside knows of one admitted sequence."""

    seq_id: int
    key: tuple[int, int]
    alone: Stream
    tokens: list[int] = field(default_factory=list)
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
        blocks = fewest + random.choice((0, 1, fewest // 2, fewest * 2, fewest * 8))
        self.facts = ModelFacts("fake", "fake", VOCAB, self.max_len, EOS, block_tokens, blocks)
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
        )
        self.core = SchedulerCore(self.limits, Kv(prefix_cache=random.random() < 0.8), seed, RECOVER_S)
        self.worker: FakeWorker | None = None
        self.salts: dict[int, int] = {}
        self.clients: dict[int, Client] = {}
        self.refused: set[int] = set()
        self.admitted: list[Admit] = []
        self.handled = 0  # of them
        self.spoilt = 0  # results that the core must reject
        self.paused: list[int] = []  # ids, some of which have ended
        self.orderly = True  # nobody was sent back to the queue by the last call
        self.trace = hashlib.blake2b(digest_size=16)
        self.now_s = 0.0

    def run(self, actions: int = 250) -> str:
        """The whole scenario; returns the trace's hash."""
        rates = self._rates()
        for _ in range(actions):
            names = self.random.choices(list(rates), list(rates.values()), k=self.random.choice((1, 1, 2, 4)))
            self._handle([event for name in names for event in getattr(self, f"_{name}")()])
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
            "lose_worker": faults,
            "worker_ready": 3.0,
            "fail_step": faults,
            "fail_rows": faults,
            "bad_result": faults,
            "lose_peer": faults / 3,
            "take_over": faults * 2,
            "pause": 0.0 if calm else 0.7,
            "resume": 1.0,
        }

    def _admit(self) -> list[Event]:
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

    def _work(self) -> list[Event]:
        if self.worker is not None and self.worker.plans:
            self.worker.step(fails=False)
        return []

    def _fail_step(self) -> list[Event]:
        if self.worker is not None and self.worker.plans:
            self.worker.step(fails=True)
            for client in self._open():
                client.may_end.add(FinishReason.ERROR)
        return []

    def _fail_rows(self) -> list[Event]:
        """The device has no memory for some rows of a step, however small the pieces."""
        worker = self.worker
        if worker is not None and worker.plans:
            slots = unpack_i32(worker.plans[0].slots)
            failed = self.random.sample(range(len(slots)), self.random.randint(1, len(slots)))
            worker.step(fails=False, failed=failed)
            for place in failed:
                if client := self.clients.get(worker.rows[slots[place]].seq_id):  # shares its ends with its heir
                    client.may_end.add(FinishReason.ERROR)
        return []

    def _deliver(self) -> list[Event]:
        worker = self.worker
        if worker is None or not worker.results:
            return []
        result = worker.results.popleft()
        if result.error or result.failed:
            worker.unheard_failures -= 1
            worker.excused_until = worker.plans[-1].step if worker.plans else worker.last_step
        return [result]

    def _open(self) -> list[Client]:
        return [client for client in self.clients.values() if client.reason is None and client.heir is None]

    def _abort(self) -> list[Event]:
        return self._end(Abort, FinishReason.ABORT)

    def _stop(self) -> list[Event]:
        return self._end(Stop, FinishReason.STOP_STRING)

    def _end(self, kind: type[Abort] | type[Stop], reason: FinishReason) -> list[Event]:
        if not self.clients:
            return []
        client = self.random.choice(list(self.clients.values()))
        client.may_end.add(reason)
        return [kind(client.seq_id)]

    def _pause(self) -> list[Event]:
        """A client stops reading, whether there is anything left to read or not."""
        if not self.clients:
            return []
        admit = self.random.choice(list(self.clients.values())[-12:]).admit
        assert admit is not None
        self.paused.append(admit.origin)
        return [Pause(self.paused[-1], True)]

    def _resume(self) -> list[Event]:
        if not self.paused:
            return []
        return [Pause(self.paused.pop(self.random.randrange(len(self.paused))), False)]

    def _tick(self) -> list[Event]:
        return [Tick()]

    def _repeat(self) -> list[Event]:
        known = [admit for admit in self.admitted[: self.handled] if admit.seq_id not in self.refused]
        return [self.random.choice(known)] if known else []

    def _garbage(self) -> list[Event]:
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
                    StepResult(10**9, b"abc"),
                    StepResult(-1, b""),
                    Admit(seq_id, b"", good),
                    Admit(seq_id, b"\0\0\0", good),
                    Admit(seq_id, pack_i32((1, VOCAB)), good),
                    Admit(seq_id, pack_i32((1, -1)), good),
                    Admit(seq_id, pack_i32([1] * self.max_len), good),
                    Admit(seq_id, pack_i32((1,)), good, n=0),
                    Admit(seq_id, pack_i32((1,)), good, n=10**12),
                    Admit(seq_id, pack_i32((1,)), Sampling(max_tokens=0)),
                    Admit(seq_id, pack_i32((1,)), good, output=b"\0"),
                    Admit(-5, pack_i32((1,)), good),
                    Admit(2**64 - 1, pack_i32((1,)), good, n=2),
                )
            )
        ]

    def _lose_worker(self) -> list[Event]:
        if self.worker is None:
            return [WorkerLost("again")]
        self._let_die()
        return [WorkerLost("killed")]

    def _let_die(self) -> None:
        self.worker = None
        for client in self._open():
            client.may_end.add(FinishReason.ERROR)

    def _worker_ready(self) -> list[Event]:
        if self.worker is not None and self.random.random() < 0.95:
            return []
        if self.worker is not None:
            self._let_die()
        rows = self.random.randint(1, 12)
        self.worker = FakeWorker(self.facts, rows, self.limits.step_tokens, self.limits.chunk_tokens, self.salts)
        return [WorkerReady(self.facts, rows)]

    def _bad_result(self) -> list[Event]:
        """The oldest result, spoilt: the core must give the worker up."""
        worker = self.worker
        if worker is None or not worker.results or worker.unheard_failures:
            return []
        result = worker.results.popleft()
        spoilt = self.random.choice((result.tokens + pack_i32((1,)), b"x", pack_i32((VOCAB,)) + result.tokens[4:]))
        self._let_die()
        self.spoilt += 1
        return [StepResult(result.step, spoilt)]

    def _lose_peer(self) -> list[Event]:
        lost = self.random.choice((ApiLost(1), TokenizerLost(2), ApiLost(200)))
        for client in self._open():
            owner = tokenizer_of(client.seq_id) if isinstance(lost, TokenizerLost) else api_of(client.seq_id)
            if owner == lost.instance:
                client.may_end.add(FinishReason.ABORT)
        return [lost]

    def _take_over(self) -> list[Event]:
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

    # Effects

    def _handle(self, events: list[Event]) -> None:
        self.now_s += 0.001
        preemptions = self.core.metrics()["preemptions"]
        effects = self.core.handle(events, self.now_s)
        self.core.check()
        self.orderly = preemptions == self.core.metrics()["preemptions"]
        self.handled = len(self.admitted)
        for effect in effects:
            self.trace.update(msgspec.msgpack.encode(effect))
            self._on_effect(effect)

    def _on_effect(self, effect: Effect) -> None:
        match effect:
            case SendPlan(plan):
                assert self.worker is not None, "a plan for no worker"
                self.worker.plans.append(plan)
                self._check_order({added.seq_id for added in plan.added})
            case SendRefused(_, refused):
                self.refused |= {seq_id for seq_id in self.clients if seq_id >> 2 == refused.seq_id >> 2}
            case SendTokens(tokenizer, batch):
                self._on_tokens(tokenizer, batch)
            case WorkerFault():
                self.spoilt -= 1
                assert self.spoilt >= 0, "a good worker was given up"

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
            client.reason = finished.reason

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

    def _check_order(self, added: set[int]) -> None:
        """Nobody overtakes within a tenant, except while the head waits for a sibling that computes their prompt."""
        if not added or not self.orderly:
            return
        sequences = self.core._state.sequences
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
            if self.core.idle:
                return
            events = self._worker_ready() if self.worker is None else []
            self._work()
            self._handle(events + self._deliver())
        stuck = [self.story(client.seq_id) for client in self._open() if client.seq_id not in self.refused]
        raise AssertionError("no end within the bound:\n" + "\n".join(stuck))

    def _check_end(self) -> None:
        assert self.spoilt == 0, "a bad result was accepted"
        load = self.core.load()
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
            if client.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH):
                assert (tokens, client.reason) == (alone.tokens, alone.reason), f"{client} ends too soon\n{story}"
            else:
                assert client.reason in client.may_end, f"{client.reason} without a cause\n{story}"

    def story(self, seq_id: int) -> str:
        return "\n".join(self.core.story(seq_id))

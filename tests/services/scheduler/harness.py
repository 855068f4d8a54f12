"""A core with a worker that answers when told to; every call is followed by `check()`."""

from collections.abc import Sequence
from typing import Any

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.protocol import (
    Admit,
    Finished,
    ModelFacts,
    Refused,
    Sampling,
    StepPlan,
    StepResult,
    WorkerReady,
    make_seq_id,
)
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Effect, Event, SendPlan, SendRefused, SendTokens, WorkerFault

EOS = 2
VOCAB = 100
PLAIN = 50  # a token that ends nothing


def ids(count: int, start: int = 10) -> list[int]:
    """A prompt of `count` tokens."""
    return [(start + idx) % VOCAB for idx in range(count)]


class Harness:
    """Blocks of 4 tokens, 2 plans in flight, unless said otherwise."""

    def __init__(
        self, blocks: int = 64, max_len: int = 64, prefix_cache: bool = True, parity: int = 0, **limits: Any
    ) -> None:
        self.core = SchedulerCore(Scheduler(**limits), Kv(prefix_cache=prefix_cache), seed=5)
        self.facts = ModelFacts("m", "a", VOCAB, max_len, (EOS,), 4, blocks, attention_parity=parity)
        self.plans: list[StepPlan] = []  # not answered yet
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.refused: list[Refused] = []
        self.faults: list[str] = []
        self.next_counter = 0
        self.now_s = 0.0

    @classmethod
    def with_worker(cls, **options: Any) -> "Harness":
        harness = cls(**options)
        harness.ready()
        return harness

    def send(self, *events: Event) -> list[Effect]:
        self.now_s += 1.0
        effects = self.core.handle(events, self.now_s)
        self.core.check()
        for effect in effects:
            match effect:
                case SendPlan(plan):
                    self.plans.append(plan)
                case SendTokens():
                    self._receive(effect)
                case SendRefused(_, refused):
                    self.refused.append(refused)
                case WorkerFault(reason):
                    self.faults.append(reason)
                    self.plans.clear()
        return effects

    def _receive(self, sent: SendTokens) -> None:
        batch = sent.batch
        rows = zip(unpack_u64(batch.seq_ids), unpack_i32(batch.first_index), unpack_i32(batch.tokens), strict=True)
        for seq_id, index, token in rows:
            stream = self.tokens.setdefault(seq_id, [])
            assert index == len(stream) and seq_id not in self.finished
            stream.append(token)
        for finished in batch.finished:
            assert finished.seq_id not in self.finished, "two terminals"
            self.finished[finished.seq_id] = finished

    def ready(self, max_rows: int = 16) -> list[Effect]:
        return self.send(WorkerReady(self.facts, max_rows))

    def message(self, prompt: Sequence[int], n: int = 1, priority: int = 0, **sampling: Any) -> Admit:
        """An Admit with a new id; `max_tokens` is 8 unless given."""
        seq_id = make_seq_id(0, 0, 9, self.next_counter)
        self.next_counter += max(n, 1)
        return Admit(seq_id, pack_i32(prompt), Sampling(**{"max_tokens": 8, **sampling}), n, priority)

    def admit(self, prompt: Sequence[int], **options: Any) -> int:
        admit = self.message(prompt, **options)
        self.send(admit)
        return admit.seq_id

    def answer(self, *tokens: int) -> list[Effect]:
        """The oldest plan's result; PLAIN for the samples for which no token is given."""
        plan = self.plans.pop(0)
        samples = plan.samples.count(1)
        return self.send(StepResult(plan.step, pack_i32([*tokens, *[PLAIN] * (samples - len(tokens))])))

    def run(self, most: int = 500) -> None:
        """Answers until nothing is in flight."""
        while self.plans:
            most -= 1
            assert most, "does not end"
            self.answer()

    def row_counts(self, plan: StepPlan) -> dict[int, int]:
        """Tokens by slot."""
        return dict(zip(unpack_i32(plan.slots), unpack_i32(plan.counts), strict=True))

    def all_free(self) -> bool:
        load = self.core.load()
        return load.running == load.waiting == 0 and load.blocks_free + load.blocks_cached == load.blocks_total

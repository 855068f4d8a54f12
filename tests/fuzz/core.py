"""Events straight into the scheduler's core: in any order, with any content. Nothing may make it raise or lose a block.

A step of a life is a message as it came, or the name of something that the world outside does with the core's own
plans: answer the oldest one rightly, or with one thing wrong. The plans must also fit the real worker's rows.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from common.columns import pack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.protocol import Abort, Pause, StepPlan, StepResult, Stop, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    ApiLost,
    Drain,
    SendPlan,
    SendTokens,
    Tick,
    TokenizerLost,
    WorkerFault,
    WorkerLost,
)
from services.worker.memory import Shape
from services.worker.state import Rows
from tests.fuzz.values import (
    BLOCK_TOKENS,
    FACTS,
    MAX_LEN,
    VOCAB,
    admits,
    columns,
    facts,
    good_facts,
    integers,
    seq_ids,
    texts,
)

RIGHT = ("answer",) * 6
WRONG = ("short", "long", "token", "column", "later", "error", "failed", "no such row")
messages = st.one_of(
    admits(),
    admits(),
    st.builds(WorkerReady, facts(), integers),
    st.builds(Abort, seq_ids),
    st.builds(Stop, seq_ids),
    st.builds(Pause, seq_ids, st.booleans()),
    st.builds(StepResult, integers, columns, integers, st.one_of(st.just(""), texts), st.one_of(st.just(b""), columns)),
    st.builds(TokenizerLost, st.integers(-1, 300)),
    st.builds(ApiLost, st.integers(-1, 300)),
    st.just(WorkerLost("lost")),
    st.just(Tick()),
)
steps = st.one_of(messages, st.sampled_from(RIGHT), st.sampled_from(RIGHT), st.sampled_from(WRONG), st.just(Drain()))
lives = st.builds(
    lambda ready, life: [*ready, *life],
    st.one_of(st.just([]), st.builds(WorkerReady, good_facts, st.integers(1, 5)).map(lambda ready: [ready])),
    st.lists(steps, max_size=50),
)
limits = st.builds(
    Scheduler,
    max_rows=st.integers(1, 5),
    step_tokens=st.sampled_from((1, 4, 16)),
    chunk_tokens=st.sampled_from((0, 3)),
    max_waiting=st.sampled_from((2, 50)),
    plans_in_flight=st.integers(1, 3),
    max_worker_deaths=st.integers(1, 3),
)


class Life:
    """One core and the plans that it has given to its worker."""

    def __init__(self, limits: Scheduler, prefix_cache: bool) -> None:
        self.core = SchedulerCore(limits, Kv(prefix_cache=prefix_cache), 5, recover_s=0.05)
        self.plans: deque[StepPlan] = deque()
        self.rows: Rows | None = None
        self.now_s = 0.0

    def step(self, step: Any) -> None:
        event = self._answer(step) if isinstance(step, str) else step
        if event is None:
            return
        if isinstance(event, WorkerReady | WorkerLost):
            self.plans.clear()
            self.rows = None
        if isinstance(event, WorkerReady) and event.model == FACTS and 0 < event.max_rows < 100:
            self.rows = Rows(
                Shape(event.max_rows, MAX_LEN, BLOCK_TOKENS), VOCAB, FACTS.eos_token_ids, torch.device("cpu")
            )
        self.now_s += 0.01
        for effect in self.core.handle([event], self.now_s):
            self._on_effect(effect)
        self.core.check()
        load = self.core.load()
        assert min(msgspec.structs.astuple(load)) >= 0, load
        msgspec.msgpack.encode([load, self.core.metrics(), self.core.fragmentation()])

    def _on_effect(self, effect: Any) -> None:
        msgspec.msgpack.encode(effect)  # a message that cannot be sent ends the process
        if isinstance(effect, SendPlan):
            self.plans.append(effect.plan)
            if self.rows is not None:
                self.rows.commit(self.rows.apply(effect.plan))
        elif isinstance(effect, WorkerFault):
            self.plans.clear()
        elif isinstance(effect, SendTokens):
            batch = effect.batch
            rows = len(unpack_u64(batch.seq_ids))
            assert len(batch.first_index) == len(batch.tokens) == 4 * rows

    def _answer(self, kind: str) -> StepResult | None:
        if not self.plans:
            return None
        plan = self.plans[-1] if kind == "later" else self.plans[0]
        self.plans.remove(plan)
        tokens = pack_i32((3 + plan.step) % VOCAB for samples in plan.samples if samples)
        match kind:
            case "short":
                return StepResult(plan.step, tokens[4:] if tokens else b"\0\0\0\0")
            case "long":
                return StepResult(plan.step, tokens + pack_i32((1,)))
            case "token":
                return StepResult(plan.step, pack_i32((VOCAB + 1,)) * (len(tokens) // 4))
            case "column":
                return StepResult(plan.step, tokens + b"x")
            case "error":
                return StepResult(plan.step, b"", error="the device is broken")
            case "failed":
                return StepResult(plan.step, tokens, failed=pack_i32((0, 0)))
            case "no such row":
                return StepResult(plan.step, tokens, failed=pack_i32((-1, 10**6)))
        return StepResult(plan.step, tokens)

    def end(self) -> None:
        """All that is open is aborted: nothing may be left."""
        for seq_id in list(self.core._state.sequences):
            self.step(Abort(seq_id))
        assert self.core.idle
        load = self.core.load()
        assert load.running == load.waiting == 0, load
        assert load.blocks_free + load.blocks_cached == load.blocks_total, load


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` lives. Raises what the core raised, with the shortest life that makes it."""

    @seed(first)
    @settings(max_examples=budget, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(limits, st.booleans(), lives)
    def live(limits: Scheduler, prefix_cache: bool, life: list[Any]) -> None:
        advance()
        world = Life(limits, prefix_cache)
        for step in life:
            world.step(step)
        world.end()

    live()

"""Prompts that are pooled: each ends once, with its vector, whatever happens on the way; and what is no answer."""

from typing import Any

import msgspec
import numpy as np
import pytest

from common.columns import pack_i32, unpack_i32
from common.logprobs import Report, StepLogprobs
from common.pooling import Embedding, Pooling
from common.protocol import Abort, Admit, FinishReason, Sampling, StepResult, make_seq_id
from services.scheduler.events import Effect, TokenizerLost, WorkerLost
from tests.services.scheduler.harness import PLAIN, Harness, ids

SIZE = 3
OLD, NEW = make_seq_id(0, 0, 9, 500), make_seq_id(0, 1, 9, 501)
LAST, MEAN = Pooling("last"), Pooling("mean")


def vector(tokens: list[int], pooling: Pooling) -> bytes:
    numbers = [float(tokens[-1]), 0.5, 1.0] if pooling.mode == "last" else [float(sum(tokens)), len(tokens), 2.0]
    return np.array(numbers[: pooling.dimensions or SIZE], np.float32).tobytes()


class Pooled(Harness):
    """A worker that computes vectors of what its rows compute, so that a chunk left out or run twice is seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.facts = msgspec.structs.replace(self.facts, embedding=Embedding(SIZE))
        self.rows: dict[int, tuple[Pooling | None, list[int], list[int]]] = {}  # by slot: prompt, what was computed
        self.ready()

    def result(self, failed: tuple[int, ...] = ()) -> StepResult:
        plan = self.plans.pop(0)
        for row in plan.added:
            self.rows[row.slot] = row.sampling.report.pooling, list(unpack_i32(row.tokens)), []
        vectors: dict[int, bytes] = {}
        columns = (unpack_i32(column) for column in (plan.slots, plan.positions, plan.counts))
        for place, (slot, position, count, samples) in enumerate(zip(*columns, plan.samples, strict=True)):
            pooling, prompt, computed = self.rows[slot]
            if pooling is None:
                continue
            assert not samples, "a prompt that is pooled yields no token"
            computed += prompt[position : position + count]
            if position + count == len(prompt) and place not in failed:
                vectors[place] = vector(computed, pooling)
        tokens = pack_i32([PLAIN] * plan.samples.count(1))
        logprobs = StepLogprobs(vectors=vectors) if vectors else None
        return StepResult(plan.step, tokens, failed=pack_i32(failed), logprobs=logprobs)

    def answer(self, *tokens: int, failed: tuple[int, ...] = (), **changes: Any) -> list[Effect]:
        return self.send(msgspec.structs.replace(self.result(failed), **changes))

    def ask(self, prompt: list[int], pooling: Pooling = LAST, **options: Any) -> int:
        return self.admit(prompt, max_tokens=0, report=Report(pooling=pooling), **options)

    def check(self, seq_id: int, prompt: list[int], pooling: Pooling = LAST) -> None:
        finished = self.finished[seq_id]
        assert (finished.reason, finished.vector) == (FinishReason.EOS, vector(prompt, pooling))
        assert seq_id not in self.tokens


@pytest.mark.parametrize("limits", [{}, {"step_tokens": 5}, {"blocks": 16}, {"policy": "prefill_first"}])
def test_each_ends_with_its_vector(limits: dict[str, Any]) -> None:
    """Alone, beside rows that decode, in chunks, where blocks are short."""
    core = Pooled(**limits)
    other = core.admit(ids(9), max_tokens=30)
    asked = [
        (core.ask(ids(size, size), pooling), ids(size, size), pooling)
        for size in (1, 4, 13)
        for pooling in (MEAN, LAST)
    ]
    cut = Pooling("mean", dimensions=2)
    asked += [(core.ask(ids(40), cut), ids(40), cut), (core.ask(ids(3), LAST), ids(3), LAST)]
    core.run(2000)
    for each in asked:
        core.check(*each)
    assert len(core.tokens[other]) == 30 and not core.faults and core.all_free()


def test_the_longest_prompt_needs_no_room_for_a_token() -> None:
    core = Pooled(max_len=32)
    core.check(*core_run(core, ids(32)))
    core.ask(ids(33))
    assert core.refused[-1].reason == "too_long"
    core = Pooled(max_len=64, blocks=8)  # of 4 tokens
    core.check(*core_run(core, ids(32)))
    core.ask(ids(33))
    assert core.refused[-1].reason == "too_long"


def core_run(core: Pooled, prompt: list[int]) -> tuple[int, list[int]]:
    seq_id = core.ask(prompt)
    core.run()
    return seq_id, prompt


def test_a_mean_computes_what_the_cache_has_and_leaves_it_for_others() -> None:
    core = Pooled()
    first = core.ask(ids(13), MEAN)
    core.run()
    last = core.ask(ids(13), LAST)
    assert core.plans[0].added[0].computed == 12
    core.run()
    mean = core.ask(ids(13), MEAN)
    assert core.plans[0].added[0].computed == 0
    core.run()
    core.check(first, ids(13), MEAN)
    core.check(mean, ids(13), MEAN)
    core.check(last, ids(13))
    assert [core.finished[each].cached_tokens for each in (first, last, mean)] == [0, 12, 0]


@pytest.mark.parametrize("answers", range(5))
def test_a_lost_worker_begins_it_anew(answers: int) -> None:
    core = Pooled(max_worker_deaths=99, step_tokens=4, prefix_cache=False)
    asked = [(core.ask(ids(17), pooling), ids(17), pooling) for pooling in (MEAN, LAST)]
    for _ in range(answers):
        core.answer()
    core.send(WorkerLost())
    core.plans.clear()
    core.ready()
    core.run()
    for each in asked:
        core.check(*each)


@pytest.mark.parametrize("answers", range(5))
def test_who_takes_over_gets_the_vector(answers: int) -> None:
    """Also when it had been told to a tokenizer that died with it."""
    core = Pooled(step_tokens=4)
    admit = Admit(OLD, pack_i32(ids(9)), Sampling(0, report=Report(pooling=MEAN)))
    core.send(admit)
    for _ in range(answers):
        if core.plans:
            core.answer()
    core.send(TokenizerLost(0))
    core.send(msgspec.structs.replace(admit, seq_id=NEW, origin=OLD))
    core.run()
    core.check(NEW, ids(9), MEAN)


def test_an_abort_frees_it_and_its_vector_is_for_nobody() -> None:
    core = Pooled()
    seq_id = core.ask(ids(9))
    core.send(Abort(seq_id))
    core.run()
    assert core.finished[seq_id].reason is FinishReason.ABORT and not core.finished[seq_id].vector
    assert core.all_free() and not core.faults


def test_rows_without_memory_and_steps_that_fail() -> None:
    core = Pooled()
    lost, kept = core.ask(ids(5)), core.ask(ids(6, 50))
    core.answer(failed=(0,))
    core.run()
    assert core.finished[lost].code == "out_of_memory"
    core.check(kept, ids(6, 50))
    failed = core.ask(ids(5))
    core.answer(error="injected", tokens=b"", logprobs=None)
    assert core.finished[failed].reason is FinishReason.ERROR and core.all_free()


@pytest.mark.parametrize(
    "vectors", [{}, {0: b"\0" * 8}, {0: b"\0" * 12, 1: b"\0" * 12}, {1: b"\0" * 12}, {-1: b"\0" * 12}]
)
def test_a_result_that_does_not_fit_is_the_workers_fault(vectors: dict[int, bytes]) -> None:
    core = Pooled(max_worker_deaths=99)
    seq_id, other = core.ask(ids(5)), core.admit(ids(5, 50))
    core.answer(logprobs=StepLogprobs(vectors=vectors))
    assert len(core.faults) == 1 and not core.finished
    core.ready()
    core.run()
    core.check(seq_id, ids(5))
    assert len(core.tokens[other]) == 8


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 1}, "pooling"),
        ({"n": 2}, "pooling"),
        ({"report": Report(1, pooling=LAST)}, "pooling"),
        ({"report": Report(pooling=Pooling(dimensions=4))}, "dimensions"),
        ({"report": Report(pooling=Pooling(dimensions=-1))}, "dimensions"),
        ({"report": Report()}, "max_tokens"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], param: str) -> None:
    core = Pooled()
    core.admit(ids(5), **{"max_tokens": 0, "report": Report(pooling=LAST), **changes})
    assert core.refused[-1].param == param and not core.plans


def test_a_worker_without_vectors() -> None:
    """It may be known when they are asked for, or come later."""
    core = Harness.with_worker()
    core.admit(ids(5), max_tokens=0, report=Report(pooling=LAST))
    assert core.refused[-1].param == "model"
    core = Harness()
    seq_id = core.admit(ids(5), max_tokens=0, report=Report(pooling=LAST))
    core.ready()
    assert core.finished[seq_id].reason is FinishReason.ERROR and not core.plans

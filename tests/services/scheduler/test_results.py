"""Results: good, failed, impossible."""

import pytest

from common.columns import pack_i32, unpack_i32
from common.protocol import Abort, FinishReason, Grammar, RowFault, StepResult
from tests.services.scheduler.harness import EOS, PLAIN, VOCAB, Harness, ids


def test_tokens_of_rows_that_step_come_before_those_that_fill() -> None:
    core = Harness.with_worker(plans_in_flight=1)
    first = core.admit(ids(3))
    second = core.admit(ids(3, 40))
    core.answer(60)
    assert len(core.plans) == 1
    core.answer(61, 70)
    assert core.tokens == {first: [60, 61], second: [70]}
    core.answer(62, 71)
    assert core.tokens == {first: [60, 61, 62], second: [70, 71]}


def test_an_end_in_the_middle_leaves_the_others_in_place() -> None:
    core = Harness.with_worker()
    seq_ids = [core.admit(ids(3, 10 * number)) for number in range(1, 5)]
    while len(core.tokens) < 4:
        core.answer()
    before = {seq_id: len(core.tokens[seq_id]) for seq_id in seq_ids}
    core.answer(60, EOS, 62, 63)
    core.answer(70, 71, 72, 73)
    assert core.tokens[seq_ids[1]][before[seq_ids[1]] :] == [EOS]
    for seq_id, added in zip((seq_ids[0], seq_ids[2], seq_ids[3]), ([60, 70], [62, 72], [63, 73]), strict=True):
        assert core.tokens[seq_id][before[seq_id] :] == added


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (b"", "0 bytes of tokens for 1 rows"),
        (b"\1\0\0", "3 bytes of tokens"),
        (pack_i32([1, 1]), "8 bytes of tokens"),
        (pack_i32([VOCAB]), f"token {VOCAB}, outside"),
        (pack_i32([-1]), "token -1, outside"),
    ],
)
def test_an_impossible_result_is_a_fault_and_rows_run_again(column: bytes, reason: str) -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    core.answer(60)
    step = core.plans[0].step
    core.send(StepResult(step, column))
    assert reason in core.faults[0]
    assert core.core.load().waiting == 1 and core.core.metrics()["worker_faults"] == 1
    core.ready()
    core.run()
    assert core.tokens[seq_id] == [60, *[PLAIN] * 7]


def test_a_result_out_of_order_is_a_fault() -> None:
    core = Harness.with_worker()
    core.admit(ids(5))
    core.send(StepResult(core.plans[1].step, pack_i32([PLAIN])))
    assert "came before" in core.faults[0]


def test_a_repeated_result_is_counted() -> None:
    core = Harness.with_worker()
    core.admit(ids(5))
    result = StepResult(core.plans.pop(0).step, pack_i32([PLAIN]))
    core.send(result)
    core.send(result)
    assert core.core.metrics()["unknown_results"] == 1 and core.faults == []


def test_a_failed_step_ends_its_rows_and_frees_their_blocks() -> None:
    core = Harness.with_worker()
    seq_ids = [core.admit(ids(5)), core.admit(ids(9, 40))]
    core.answer()
    core.send(StepResult(core.plans.pop(0).step, b"", error="out of memory"))
    ended = {seq_id: (end.reason, end.message) for seq_id, end in core.finished.items()}
    assert ended[seq_ids[0]] == (FinishReason.ERROR, "out of memory")
    core.run()
    assert core.all_free()


def test_what_a_failed_step_published_is_not_found_and_its_finders_start_again() -> None:
    core = Harness.with_worker(step_tokens=8, max_rows=8)
    first, second = core.message(ids(20)), core.message(ids(20))
    core.send(first, second)
    core.answer()
    found = core.plans[1].added[0]
    assert (found.seq_id, found.computed) == (second.seq_id, 16)
    core.send(StepResult(core.plans.pop(0).step, b"", error="broken"))
    assert core.finished[first.seq_id].reason is FinishReason.ERROR
    again = core.plans[-1].added[0]
    assert (again.seq_id, again.computed) == (second.seq_id, 8), "only what the step before it has computed"
    core.run()
    assert core.finished[second.seq_id].reason is FinishReason.LENGTH
    assert core.tokens[second.seq_id] == [PLAIN] * 8 and core.all_free()


def test_rows_without_memory_end_and_the_others_go_on() -> None:
    core = Harness.with_worker()
    first, second, third = (core.admit(ids(5, 10 * number)) for number in range(1, 4))
    while len(core.tokens) < 3:
        core.answer()
    before = {seq_id: list(core.tokens[seq_id]) for seq_id in (first, second, third)}
    core.send(StepResult(core.plans.pop(0).step, pack_i32([60, 0, 62]), failed=pack_i32([1])))
    end = core.finished[second]
    assert (end.reason, end.code) == (FinishReason.ERROR, "out_of_memory") and "no memory" in end.message
    assert core.tokens[second] == before[second], "a token that means nothing was delivered"
    assert core.tokens[first] == [*before[first], 60] and core.tokens[third] == [*before[third], 62]
    core.run()
    assert core.finished[first].reason is core.finished[third].reason is FinishReason.LENGTH
    assert core.core.metrics()["out_of_memory"] == 1 and core.core.metrics()["failed_steps"] == 0
    assert core.faults == [] and core.all_free()


def test_what_a_row_without_memory_published_is_not_found() -> None:
    core = Harness.with_worker(step_tokens=8, max_rows=8)
    first, second = core.message(ids(20)), core.message(ids(20))
    core.send(first, second)
    core.answer()
    found = core.plans[1].added[0]
    assert (found.seq_id, found.computed) == (second.seq_id, 16)
    core.send(StepResult(core.plans.pop(0).step, b"", failed=pack_i32([0])))
    assert core.finished[first.seq_id].code == "out_of_memory"
    assert core.plans[-1].added[0].seq_id == second.seq_id
    core.run()
    assert core.tokens[second.seq_id] == [PLAIN] * 8 and core.all_free()


def test_a_row_that_has_ended_meanwhile_may_lack_memory_too() -> None:
    core = Harness.with_worker()
    first, second = core.admit(ids(5)), core.admit(ids(5, 40))
    while len(core.tokens) < 2:
        core.answer()
    core.send(Abort(first))
    core.send(StepResult(core.plans.pop(0).step, pack_i32([0, 61]), failed=pack_i32([0])))
    assert core.finished[first].reason is FinishReason.ABORT and core.tokens[second][-1] == 61
    core.run()
    assert core.core.metrics()["out_of_memory"] == 0 and core.all_free()


@pytest.mark.parametrize("column", [pack_i32([1]), pack_i32([-1]), b"\0\0"])
def test_failed_rows_that_the_plan_does_not_have_are_a_fault(column: bytes) -> None:
    core = Harness.with_worker()
    core.admit(ids(5))
    core.send(StepResult(core.plans.pop(0).step, pack_i32([60]), failed=column))
    assert "does not have" in core.faults[0]


GRAMMAR = Grammar("regex", "a", "guided_regex")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_row_whose_grammar_cannot_go_on_ends_alone(steps: int) -> None:
    core = Harness.with_worker()
    free, bound = core.admit(ids(3)), core.admit(ids(3, 40), grammar=GRAMMAR)
    while 1 not in unpack_i32(core.plans[0].slots) or len(core.tokens.get(bound, [])) < steps:
        core.answer()
    plan = core.plans.pop(0)
    place = list(unpack_i32(plan.slots)).index(1)
    assert plan.samples[place]
    fault = RowFault(place, "guided_regex: it is too complex")
    before = len(core.tokens.get(bound, []))
    core.send(StepResult(plan.step, pack_i32([PLAIN] * plan.samples.count(1)), faults=[fault]))
    ended = core.finished[bound]
    assert (ended.reason, ended.message, ended.code) == (FinishReason.ERROR, fault.message, "invalid")
    assert len(core.tokens.get(bound, [])) == before, "the faulty token is nobody's"
    core.run()
    assert core.tokens[free] == [PLAIN] * 8 and core.core.metrics()["out_of_memory"] == 0


def test_a_row_whose_grammar_is_being_prepared_starts_again() -> None:
    core = Harness.with_worker()
    free, bound = core.admit(ids(3)), core.admit(ids(3, 40), grammar=GRAMMAR)
    while core.plans[0].samples.count(1) != 2:
        core.answer()
    for _ in range(3):
        plan = core.plans.pop(0)
        slots = unpack_i32(plan.slots)
        faults = [RowFault(place) for place, slot in enumerate(slots) if slot == 1 and plan.samples[place]]
        core.send(StepResult(plan.step, pack_i32([PLAIN] * plan.samples.count(1)), faults=faults))
    assert bound not in core.tokens and bound not in core.finished
    core.run()
    assert core.tokens[free] == core.tokens[bound] == [PLAIN] * 8
    assert core.core.metrics()["preemptions"] >= 1


def test_faults_of_rows_that_the_plan_does_not_have() -> None:
    core = Harness.with_worker()
    core.admit(ids(5))
    core.send(StepResult(core.plans.pop(0).step, pack_i32([60]), faults=[RowFault(1, "x")]))
    assert "faulty rows" in core.faults[0]


def test_under_a_grammar_an_end_ends() -> None:
    """Its mask lets none come too soon, but where nothing else may."""
    core = Harness.with_worker()
    bound = core.admit(ids(3), grammar=GRAMMAR, min_tokens=6, ignore_eos=True)
    free = core.admit(ids(3, 40), min_tokens=6, ignore_eos=True)
    while len(core.tokens) < 2:
        core.answer()
    core.answer(EOS, EOS)
    assert core.finished[bound].reason is FinishReason.EOS and free not in core.finished

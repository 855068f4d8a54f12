"""What a step consists of: budget, chunks, order, sharing, preemption."""

import pytest

from common.columns import unpack_i32
from common.protocol import Abort, FinishReason, StepPlan
from services.scheduler import policy
from tests.services.scheduler.harness import EOS, PLAIN, Harness, ids


def columns(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(slot, position, count, samples) of each row."""
    numbers = (unpack_i32(plan.slots), unpack_i32(plan.positions), unpack_i32(plan.counts))
    return list(zip(*numbers, plan.samples, strict=True))


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    core = Harness.with_worker(step_tokens=4, max_rows=2)
    core.admit(ids(10))
    assert columns(core.plans[0]) == [(0, 0, 4, 0)]
    assert columns(core.plans[1]) == [(0, 4, 4, 0)]
    core.answer()
    assert columns(core.plans[1]) == [(0, 8, 2, 1)]
    core.answer()
    assert columns(core.plans[1]) == [(0, 10, 1, 1)]


def test_chunk_tokens_lets_several_prompts_advance() -> None:
    core = Harness.with_worker(step_tokens=10, chunk_tokens=4)
    core.send(core.message(ids(9)), core.message(ids(9, 30)), core.message(ids(9, 60)))
    assert columns(core.plans[0]) == [(0, 0, 4, 0), (1, 0, 4, 0), (2, 0, 2, 0)]


def test_rows_that_step_come_first_and_prompts_fill_the_rest() -> None:
    core = Harness.with_worker(step_tokens=6)
    core.admit(ids(3))
    core.admit(ids(20, 40))
    core.answer()
    assert columns(core.plans[1]) == [(0, 4, 1, 1), (1, 0, 5, 0)]
    core.answer()
    assert columns(core.plans[1]) == [(0, 5, 1, 1), (1, 5, 5, 0)]


def test_chunks_beside_rows_that_step_shrink_so_that_they_cost_the_same() -> None:
    """Parity 10: a token after 10 others costs twice as much as the first one."""
    core = Harness.with_worker(step_tokens=17, chunk_context=4, parity=10, plans_in_flight=1)
    core.admit(ids(3))
    core.admit(ids(60, 40), max_tokens=2)
    core.answer()
    chunks = []
    while len(unpack_i32(core.plans[0].counts)) == 2 and core.plans[0].counts != b"\1\0\0\0" * 2:
        chunks.append(columns(core.plans[0])[1][1:3])
        core.answer()
    assert [position for position, _ in chunks] == [0, *(position + count for position, count in chunks[:-1])]
    most = policy.step_cost(17, 4, 10)
    for position, count in chunks[1:-1]:  # the first one is bounded by its tokens
        assert policy.chunk_cost(count, position, 10) <= most < policy.chunk_cost(count + 1, position, 10)
    assert sorted((count for _, count in chunks), reverse=True) == [count for _, count in chunks] and len(chunks) > 4


def test_a_prompt_alone_has_the_whole_step_whatever_it_costs() -> None:
    core = Harness.with_worker(step_tokens=16, chunk_context=1, parity=1, plans_in_flight=1)
    core.admit(ids(60))
    counts = []
    while not core.plans[0].samples[0]:
        counts += unpack_i32(core.plans[0].counts).tolist()
        core.answer()
    assert counts == [16, 16, 16]


def test_one_prompt_among_rows_that_step_gets_small_chunks_and_many_get_large_ones() -> None:
    core = Harness.with_worker(step_tokens=16, chunk_beside=4, plans_in_flight=1)
    core.admit(ids(3), max_tokens=40)
    core.admit(ids(20, 40))
    core.answer()
    assert columns(core.plans[0]) == [(0, 3, 1, 1), (1, 0, 8, 0)]  # as many decode as are filled
    core.send(*(core.message(ids(20, 70 + 20 * i)) for i in range(2)))
    core.answer()
    assert columns(core.plans[0]) == [(0, 4, 1, 1), (1, 8, 12, 1)]  # three of four are filled, or could be


def test_a_prompt_beside_many_rows_that_step_has_its_least() -> None:
    core = Harness.with_worker(step_tokens=64, chunk_beside=6, plans_in_flight=1)
    core.send(*(core.message(ids(2, 10 * i), max_tokens=9) for i in range(15)))
    core.answer()
    core.admit(ids(9, 300))
    core.answer()
    assert columns(core.plans[0])[15:] == [(15, 0, 6, 0)]


def test_prefill_first_gives_prompts_a_step_of_their_own() -> None:
    core = Harness.with_worker(policy="prefill_first")
    core.admit(ids(3))
    core.admit(ids(9, 40))
    core.answer()
    assert columns(core.plans[1]) == [(1, 0, 9, 1)]
    core.answer()
    assert columns(core.plans[1]) == [(0, 4, 1, 1), (1, 9, 1, 1)]


def test_a_row_starts_with_all_its_blocks_and_grows_one_by_one() -> None:
    core = Harness.with_worker(plans_in_flight=1)
    core.admit(ids(7))
    added = core.plans[0].added[0]
    assert len(unpack_i32(added.blocks)) == 2 and (added.computed, added.num_prompt) == (0, 7)
    core.answer()
    assert core.plans[0].grown_slots == b""
    core.answer()
    assert list(unpack_i32(core.plans[0].grown_slots)) == [added.slot]
    assert not set(unpack_i32(core.plans[0].grown_blocks)) & set(unpack_i32(added.blocks))


def test_nothing_is_planned_behind_the_length_limit() -> None:
    core = Harness.with_worker()
    core.admit(ids(5), max_tokens=2)
    assert len(core.plans) == 2
    core.answer()
    assert len(core.plans) == 1


def test_a_slot_freed_by_a_plan_is_used_by_the_same_plan() -> None:
    core = Harness.with_worker(max_rows=1, plans_in_flight=1)
    core.admit(ids(3), max_tokens=1)
    second = core.admit(ids(3, 40))
    core.answer()
    assert list(unpack_i32(core.plans[0].removed)) == [0]
    assert [(added.slot, added.seq_id) for added in core.plans[0].added] == [(0, second)]


def test_a_prefix_hit_skips_whole_blocks_but_never_the_last_token() -> None:
    core = Harness.with_worker()
    core.admit(ids(8))
    core.run()
    again = core.admit(ids(8))
    assert core.plans[0].added[0].computed == 4
    assert columns(core.plans[0]) == [(0, 4, 4, 1)]
    core.run()
    assert core.finished[again].cached_tokens == 4


def test_a_prefix_is_found_as_soon_as_its_plan_is_issued_but_not_within_it() -> None:
    core = Harness.with_worker()
    core.send(core.message(ids(9)), core.message(ids(9)))
    assert [added.computed for added in core.plans[0].added] == [0, 0]
    core.run()
    core = Harness.with_worker()
    core.admit(ids(9, 50))
    core.answer()
    core.admit(ids(9, 50))
    assert core.plans[-1].added == []
    core.answer()
    assert core.plans[-1].added[0].computed == 8


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    core = Harness.with_worker()
    core.admit(ids(6), max_tokens=8)
    core.run()
    core.admit([*ids(6), *[PLAIN] * 8, 1, 2, 3])
    assert core.plans[0].added[0].computed == 12


def test_salts_and_the_switch_keep_prefixes_apart() -> None:
    core = Harness.with_worker(prefix_cache=False)
    core.admit(ids(9))
    core.run()
    assert core.core.load().blocks_cached == 0
    core.admit(ids(9))
    assert core.plans[0].added[0].computed == 0


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9])
def test_choices_share_the_prompt_and_copy_its_last_block(num_prompt: int) -> None:
    core = Harness.with_worker(plans_in_flight=1)
    seq_id = core.admit(ids(num_prompt), n=3, seed=2**64 - 1)
    assert [added.seq_id for added in core.plans[0].added] == [seq_id]
    source = list(unpack_i32(core.plans[0].added[0].blocks))
    core.answer()
    plan = core.plans[0]
    assert [added.seq_id for added in plan.added] == [seq_id + 1, seq_id + 2]
    assert [added.sampling.seed for added in plan.added] == [0, 1]
    shared = (num_prompt - 1) // 4
    for added in plan.added:
        blocks = list(unpack_i32(added.blocks))
        assert added.computed == num_prompt - 1
        assert blocks[:shared] == source[:shared] and not set(blocks[shared:]) & set(source)
    partial = (num_prompt - 1) % 4 != 0
    assert list(unpack_i32(plan.copy_source)) == [source[shared]] * (2 * partial)
    targets = [unpack_i32(added.blocks)[shared] for added in plan.added]
    assert list(unpack_i32(plan.copy_target)) == targets * partial
    core.run()
    assert {end.reason for end in core.finished.values()} == {FinishReason.LENGTH}
    assert len(core.finished) == 3 and core.all_free()


def test_choices_wait_for_the_first_without_holding_up_others() -> None:
    core = Harness.with_worker(step_tokens=8)
    choices, other = core.message(ids(12), n=2), core.message(ids(3, 50))
    core.send(choices, other)
    assert [added.seq_id for plan in core.plans for added in plan.added] == [choices.seq_id, other.seq_id]
    core.answer()
    assert [added.seq_id for added in core.plans[-1].added] == [choices.seq_id + 1]


def test_a_choice_runs_alone_when_the_first_has_gone() -> None:
    core = Harness.with_worker(step_tokens=4, plans_in_flight=1)
    seq_id = core.admit(ids(10), n=2)
    core.send(Abort(seq_id))
    core.run()
    assert core.finished[seq_id + 1].reason is FinishReason.LENGTH
    assert core.all_free()


def test_the_newest_row_yields_its_blocks_and_loses_nothing() -> None:
    core = Harness.with_worker(blocks=5, max_len=20, plans_in_flight=1)
    old, new = core.admit(ids(7), max_tokens=12), core.admit(ids(7, 50), max_tokens=12)
    core.run()
    assert core.core.metrics()["preemptions"] >= 1
    assert "preempted" in "\n".join(core.core.story(new))
    assert "preempted" not in "\n".join(core.core.story(old))
    for seq_id in (old, new):
        assert core.tokens[seq_id] == [PLAIN] * 12
        assert core.finished[seq_id].reason is FinishReason.LENGTH
    assert core.all_free()


def test_the_less_urgent_yields_though_it_came_first() -> None:
    core = Harness.with_worker(blocks=5, max_len=20, plans_in_flight=1)
    lazy = core.admit(ids(7), max_tokens=12, priority=1)
    urgent = core.admit(ids(7, 50), max_tokens=12, priority=0)
    core.run()
    assert "preempted" in "\n".join(core.core.story(lazy))
    assert "preempted" not in "\n".join(core.core.story(urgent))


def test_a_preempted_row_starts_again_with_its_output() -> None:
    core = Harness.with_worker(blocks=5, max_len=20, plans_in_flight=1)
    core.admit(ids(7), max_tokens=12)
    new = core.admit(ids(7, 50), max_tokens=12)
    again = None
    while core.plans:
        for added in core.plans[0].added:
            if added.seq_id == new and len(added.tokens) > 28:
                again = added
        core.answer()
    assert again is not None
    count = len(again.tokens) // 4
    assert list(unpack_i32(again.tokens)) == [*ids(7, 50), *[PLAIN] * (count - 7)]
    assert again.num_prompt == 7


def test_the_most_urgent_is_admitted_first_and_the_head_is_not_overtaken() -> None:
    core = Harness.with_worker(blocks=8, max_len=32, max_rows=4, plans_in_flight=1)
    running = core.admit(ids(20), max_tokens=3)
    big, small = core.admit(ids(14, 30)), core.admit(ids(2, 60))
    urgent = core.admit(ids(3, 70), priority=-1)
    started: list[int] = []
    while core.plans:
        started += [added.seq_id for added in core.plans[0].added]
        core.answer()
    assert started[:4] == [running, urgent, big, small]


def test_one_token_per_step_still_serves_everybody() -> None:
    core = Harness.with_worker(step_tokens=1)
    seq_ids = [core.admit(ids(5)), core.admit(ids(3))]
    core.run()
    assert [len(core.tokens[seq_id]) for seq_id in seq_ids] == [8, 8]


def test_an_end_during_filling_leaves_the_budget_to_others() -> None:
    core = Harness.with_worker(plans_in_flight=1)
    first = core.admit(ids(3))
    core.answer(EOS)
    assert core.finished[first].reason is FinishReason.EOS and core.plans == []

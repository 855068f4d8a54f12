"""Rows that draft: what is reserved for them, what results give back, and that ends are where they would have been."""

from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, unpack_i32
from common.protocol import FinishReason, Grammar, RowFault, StepResult
from services.scheduler.policy import MOST_DRAFTS
from tests.services.scheduler.harness import EOS, PLAIN, Harness, ids


def drafting(drafts: int = 3, rows: int = 16, **options: Any) -> Harness:
    harness = Harness(**options)
    harness.facts = msgspec.structs.replace(harness.facts, drafts=drafts, draft_rows=rows)
    harness.ready()
    return harness


def give(harness: Harness, *rows: list[int], **changes: Any) -> None:
    """The oldest plan's result: each sampled row's tokens; one PLAIN for rows that are not given."""
    plan = harness.plans.pop(0)
    samples = plan.samples.count(1)
    tokens = [*rows, *[[PLAIN]] * (samples - len(rows))]
    counts = bytes(map(len, tokens)) if plan.drafting else b""
    planned = [count for count, sampled in zip(unpack_i32(plan.counts), plan.samples, strict=True) if sampled]
    tried = bytes(count - 1 if place < plan.drafting else 0 for place, count in enumerate(planned))
    result = StepResult(
        plan.step,
        pack_i32([token for row in tokens for token in row]),
        counts=counts,
        drafted=tried if plan.drafting else b"",
    )
    harness.send(msgspec.structs.replace(result, **changes))


def columns(harness: Harness, plan: int) -> tuple[list[int], list[int], list[int], int]:
    made = harness.plans[plan]
    return list(unpack_i32(made.slots)), list(unpack_i32(made.positions)), list(unpack_i32(made.counts)), made.drafting


def test_a_plan_reserves_as_if_all_drafts_held() -> None:
    harness = drafting()
    seq_id = harness.admit(ids(6), max_tokens=40)
    assert columns(harness, 0) == ([0], [0], [6], 0), "the prompt, without drafts"
    assert columns(harness, 1) == ([0], [6], [4], 1), "made before the first token was known"
    assert len(unpack_i32(harness.plans[1].grown_blocks)) == 1, "positions 6 to 9 are in blocks 1 and 2"
    give(harness, [11])
    assert columns(harness, 1) == ([0], [10], [4], 1)
    give(harness, [12, 13])
    assert columns(harness, 1) == ([0], [12], [4], 1), "two of four did not hold"
    assert harness.tokens[seq_id] == [11, 12, 13]
    give(harness, [14, 15, 16, 17])
    assert columns(harness, 1) == ([0], [16], [4], 1) and harness.tokens[seq_id] == [11, 12, 13, 14, 15, 16, 17]
    counters = harness.core.metrics()
    assert [counters[name] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [2, 6, 4]
    assert [counters[f"accepted_at_{place}"] for place in range(4)] == [2, 1, 1, 0]


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_the_limit_is_never_passed(kept: int) -> None:
    """A row that may have reached its limit waits for its results."""
    harness = drafting()
    seq_id = harness.admit(ids(6), max_tokens=9)
    give(harness)
    while harness.plans:
        (count,) = harness.row_counts(harness.plans[0]).values()
        give(harness, [PLAIN] * min(kept, count))
    assert harness.finished[seq_id].reason is FinishReason.LENGTH and len(harness.tokens[seq_id]) == 9
    assert harness.all_free()


def test_what_follows_an_end_is_nobodys() -> None:
    harness = drafting()
    first = harness.admit(ids(6), max_tokens=40, stop_token_ids=(7,))
    second = harness.admit(ids(5, 40), max_tokens=40, min_tokens=3)
    for _ in range(3):
        give(harness)
    drafted = [harness.row_counts(plan) for plan in harness.plans]
    assert drafted[0][1] == 1, "the second row must have three tokens before it may end, so it has no drafts yet"
    give(harness, [9, 7, 5, 5])
    assert harness.finished[first].reason is FinishReason.STOP_TOKEN and harness.finished[first].stop_token == 7
    assert harness.tokens[first][-2:] == [9, 7]
    while harness.row_counts(harness.plans[0]).get(1) != 4:
        give(harness)
    give(harness, *([[PLAIN]] if 0 in harness.row_counts(harness.plans[0]) else []), [8, EOS, 8])
    assert harness.finished[second].reason is FinishReason.EOS and harness.tokens[second][-2:] == [8, EOS]
    harness.run()
    assert harness.all_free()


def test_rows_with_penalties_and_steps_with_chunks_have_no_drafts() -> None:
    harness = drafting(step_tokens=32)
    harness.admit(ids(6), max_tokens=40, frequency_penalty=0.5)
    harness.admit(ids(5, 30), max_tokens=40)
    give(harness)
    give(harness)
    assert harness.row_counts(harness.plans[-1]) == {0: 1, 1: 4}
    harness.admit(ids(40), max_tokens=4)
    give(harness)
    assert harness.row_counts(harness.plans[-1]) == {0: 1, 1: 1, 2: 30} and harness.plans[-1].drafting == 2


def test_rows_under_a_grammar_step_beside_drafts_and_have_faults_of_their_own() -> None:
    harness = drafting()
    free = harness.admit(ids(6), max_tokens=40)
    bound = harness.admit(ids(6, 40), max_tokens=40, grammar=Grammar("regex", "a*"))
    while harness.row_counts(harness.plans[0]) != {0: 4, 1: 1}:
        give(harness)
    give(harness, [11, 12], [13])
    before = list(harness.tokens[bound])
    give(harness, [14], [15], faults=[RowFault(1)])  # its matcher is not ready: it starts again
    assert harness.tokens[free][-3:] == [11, 12, 14] and harness.tokens[bound] == before and before[-1] == 13
    while len(harness.tokens[bound]) < 5 or harness.row_counts(harness.plans[0]).get(1) != 1:
        give(harness)
    before = list(harness.tokens[bound])
    give(harness, faults=[RowFault(1, "guided_regex: it cannot go on")])
    assert harness.finished[bound].message == "guided_regex: it cannot go on" and harness.tokens[bound] == before
    while harness.plans:
        give(harness)
    assert len(harness.tokens[free]) == 40 and harness.faults == [] and harness.all_free()


def test_the_budget_of_a_step_bounds_its_drafts() -> None:
    harness = drafting(step_tokens=5, max_rows=2)
    for start in (10, 40):
        harness.admit(ids(2, start), max_tokens=20)
    for _ in range(4):
        give(harness)
    assert harness.row_counts(harness.plans[-1]) == {0: 2, 1: 2}


def test_without_blocks_for_drafts_rows_go_on_without() -> None:
    """12 blocks of 4: two rows of 24 tokens, whose drafts would need a block more."""
    harness = drafting(drafts=8, blocks=8, max_len=24, prefix_cache=False)
    first, second = harness.admit(ids(7), max_tokens=17), harness.admit(ids(7, 40), max_tokens=17)
    while harness.plans:
        give(harness)
    assert len(harness.tokens[first]) == len(harness.tokens[second]) == 17
    assert harness.core.metrics()["preemptions"] >= 1 and harness.all_free()


def test_only_what_held_is_found_by_others() -> None:
    """Blocks of 4: after a prompt of 4 and four tokens the second block is full but for its last token's KV."""
    harness = drafting()
    harness.admit(ids(4), max_tokens=40)
    give(harness, [31])
    give(harness, [32, 33, 34])
    cached = harness.core.state.worker.pool.match
    assert len(cached(pack_i32([*ids(4), 31, 32, 33, 34]), 2, root(harness), [])) == 1
    give(harness, [35])
    assert len(cached(pack_i32([*ids(4), 31, 32, 33, 34]), 2, root(harness), [])) == 2
    assert len(cached(pack_i32([*ids(4), 31, 32, 33, 39]), 2, root(harness), [])) == 1


def root(harness: Harness) -> bytes:
    (sequence,) = harness.core.state.sequences.values()
    return sequence.request.root


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": b""},
        {"counts": b"\x05", "tokens": pack_i32([PLAIN] * 5)},
        {"counts": b"\x00", "tokens": b""},
        {"counts": b"\x02"},
        {"counts": b"\x01\x01", "tokens": pack_i32([PLAIN] * 2)},
        {"drafted": b"\x04"},
        {"counts": b"\x02", "drafted": b"\x00", "tokens": pack_i32([PLAIN] * 2)},
        {"drafted": b""},
    ],
)
def test_results_that_no_plan_allows_cost_the_worker(changes: dict[str, Any]) -> None:
    harness = drafting()
    harness.admit(ids(6), max_tokens=40)
    give(harness)
    give(harness, **changes)
    assert len(harness.faults) == 1


def test_counts_for_a_step_without_drafts_cost_the_worker() -> None:
    harness = drafting()
    harness.admit(ids(6), max_tokens=40)
    give(harness, counts=b"\x01", drafted=b"\x00")
    assert len(harness.faults) == 1


def test_a_worker_with_more_drafts_than_there_can_be_is_refused() -> None:
    harness = drafting(drafts=MOST_DRAFTS + 1)
    assert "drafts is 9" in harness.faults[0]


def test_rows_go_over_from_one_way_to_the_other_and_back() -> None:
    """Steps with drafts that take long: after a comparison they end, later they come back for a trial."""
    harness = drafting(max_len=64, blocks=40, max_rows=2)
    seq_ids = []
    for _ in range(5):
        seq_ids += [harness.admit(ids(6), max_tokens=50), harness.admit(ids(9, 30), max_tokens=58)]
        while harness.plans:
            harness.now_s += 5.0 if harness.plans[0].drafting else 0.0
            give(harness)
    assert harness.core.metrics()["draft_switches"] >= 1
    assert all(len(harness.tokens[seq_id]) == count for seq_id, count in zip(seq_ids, [50, 55] * 5, strict=True))
    assert harness.all_free()
    ways = harness.core.state.worker.drafts.switch
    assert not ways.wants(2)

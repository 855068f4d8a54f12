"""Policy: plain numbers in, plain numbers out."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.protocol import ModelFacts, WorkerReady
from services.scheduler import policy


@pytest.mark.parametrize(
    ("max_rows", "step_tokens", "worker_rows", "rows"),
    [(256, 2048, 512, 256), (256, 64, 512, 64), (256, 2048, 8, 8)],
)
def test_rows_are_bounded_by_operator_budget_and_worker(
    max_rows: int, step_tokens: int, worker_rows: int, rows: int
) -> None:
    assert policy.rows_allowed(max_rows, step_tokens, worker_rows) == rows


@pytest.mark.parametrize(
    ("pending", "budget", "chunk_tokens", "count"),
    [(10, 100, 0, 10), (100, 10, 0, 10), (100, 50, 16, 16), (3, 50, 16, 3), (5, 2, 16, 2)],
)
def test_chunk(pending: int, budget: int, chunk_tokens: int, count: int) -> None:
    assert policy.chunk(pending, budget, chunk_tokens) == count


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_chunk_is_never_empty_nor_too_long(pending: int, budget: int, chunk_tokens: int) -> None:
    count = policy.chunk(pending, budget, chunk_tokens)
    assert 1 <= count <= min(pending, budget)
    assert chunk_tokens == 0 or count <= chunk_tokens


@given(st.floats(1, 1e9), st.integers(0, 10**7), st.integers(1, 10**6))
def test_the_affordable_chunk_is_the_largest(cost: float, context: int, parity: int) -> None:
    count = policy.affordable(cost, context, parity)
    assert count >= 1
    slack = 1 + 1e-9  # of the root
    assert count == 1 or policy.chunk_cost(count, context, parity) <= cost * slack
    assert policy.chunk_cost(count + 1, context, parity) * slack >= cost


def test_chunks_cost_what_tokens_and_context_do() -> None:
    assert policy.chunk_cost(7, 10**6, 0) == 7  # unknown: only tokens count
    assert policy.chunk_cost(4, 8, 10) == 8
    assert policy.affordable(8, 8, 10) == 4
    assert policy.affordable(math.inf, 8, 10) == policy.I32_MAX
    assert policy.step_cost(2048, 0, 10) == policy.step_cost(2048, 8192, 0) == math.inf
    # The first chunks, up to the context that is allowed, are never cut.
    assert policy.affordable(policy.step_cost(2048, 8192, 3840), 8192, 3840) == 2048
    assert policy.affordable(policy.step_cost(2048, 8192, 3840), 100_000, 3840) == 257


@pytest.mark.parametrize(
    ("decoding", "filling", "tokens"),
    [(0, 1, 2048), (255, 1, 512), (64, 1, 512), (1, 1, 1024), (128, 128, 1024), (1, 255, 2040), (1, 10**6, 2047)],
)
def test_chunks_share_a_step_with_rows_that_decode(decoding: int, filling: int, tokens: int) -> None:
    assert policy.beside_tokens(2048, 512, decoding, filling) == tokens


def test_chunks_beside_may_have_the_whole_step() -> None:
    assert policy.beside_tokens(2048, 0, 255, 1) == 2048  # no limit
    assert policy.beside_tokens(256, 512, 255, 1) == 256


def test_length_limit() -> None:
    assert policy.length_limit(10, 5, 100) == 15
    assert policy.length_limit(10, 10**12, 100) == 100


def test_admission_leaves_room_for_growth_unless_nothing_runs() -> None:
    assert policy.spare_blocks(99) == 0 and policy.spare_blocks(1000) == 10
    assert policy.may_admit(needed=5, free=5, num_blocks=8, running=3)
    assert not policy.may_admit(needed=6, free=5, num_blocks=8, running=0)
    assert not policy.may_admit(needed=91, free=100, num_blocks=1000, running=1)
    assert policy.may_admit(needed=90, free=100, num_blocks=1000, running=1)
    assert policy.may_admit(needed=100, free=100, num_blocks=1000, running=0)
    assert policy.may_admit(needed=80, free=100, num_blocks=1000, running=1, ahead=20)
    assert not policy.may_admit(needed=81, free=100, num_blocks=1000, running=1, ahead=20)
    assert policy.may_admit(needed=100, free=100, num_blocks=1000, running=0, ahead=20)


def test_the_victim_is_the_newest_of_the_least_urgent() -> None:
    rows = [(0, 1), (1, 2), (1, 7), (0, 9)]
    assert policy.victim((0, 1), rows) == (1, 7)
    assert policy.victim((0, 1), [(0, 1), (0, 9)]) == (0, 9)


@given(st.tuples(st.integers(), st.integers()), st.lists(st.tuples(st.integers(), st.integers())))
def test_nobody_yields_to_a_later_one(requester: policy.Key, others: list[policy.Key]) -> None:
    assert policy.victim(requester, others) >= requester


def test_a_level_of_priority_is_worth_its_time() -> None:
    assert policy.key(1, 0.0, 10.0, 0) < policy.key(0, 10.1, 10.0, 1)
    assert policy.key(1, 0.0, 10.0, 0) > policy.key(0, 9.9, 10.0, 1)
    assert policy.key(0, 5.0, 10.0, 0) < policy.key(0, 5.0, 10.0, 1)
    assert policy.key(1, 0.0, 0.0, 0) > policy.key(0, 1e9, 0.0, 1)


@given(st.integers(), st.integers(), st.floats(0, 1e9))
def test_whoever_waits_is_next_within_a_known_time(waits: int, comes: int, now_s: float) -> None:
    later_s = now_s + 2 * policy.LEVELS * 30.0 + 1
    assert policy.key(waits, now_s, 30.0, 0) < policy.key(comes, later_s, 30.0, 1)


def test_the_default_of_waiting_tokens_follows_the_step() -> None:
    assert policy.waiting_tokens(0, 2048) == 512 * 2048 and policy.waiting_tokens(7, 2048) == 7


FACTS = ModelFacts("m", "a", 100, 40, (2,), 4, 8)


def test_figures_that_no_worker_can_have_are_named() -> None:
    assert policy.absurd(WorkerReady(FACTS, 4)) == ""
    assert policy.absurd(WorkerReady(FACTS, 0)) == "max_rows is 0"
    huge = msgspec.structs.replace(FACTS, num_blocks=2**62, vocab_size=-1)
    assert policy.absurd(WorkerReady(huge, 4)) == f"num_blocks is {2**62}, vocab_size is -1"

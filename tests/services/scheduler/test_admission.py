"""What an Admit becomes."""

import msgspec
import pytest

from common.columns import pack_i32
from common.config import Kv, Scheduler
from common.errors import Reject, RejectReason
from common.protocol import Abort, Admit, FinishReason, ModelFacts, Sampling, WorkerReady, make_seq_id
from services.scheduler.admission import sequences_of
from services.scheduler.state import State
from tests.services.scheduler.harness import PLAIN, Harness, ids


@pytest.fixture
def state() -> State:
    state = State(Scheduler(max_waiting=8), Kv(), 0)
    state.attach(WorkerReady(ModelFacts("m", "a", 100, 40, (2,), 4, 8), 4))
    return state


ADMIT = Admit(40, pack_i32([5, 6, 7]), Sampling(max_tokens=10, seed=2**64 - 1, top_k=5), n=3, priority=2)


def test_choices_have_consecutive_ids_and_seeds_modulo_2_to_64(state: State) -> None:
    sequences = sequences_of(state, ADMIT)
    assert [sequence.seq_id for sequence in sequences] == [40, 41, 42]
    assert [sequence.sampling.seed for sequence in sequences] == [2**64 - 1, 0, 1]
    assert all(sequence.sampling.top_k == 5 for sequence in sequences)
    assert [sequence.key for sequence in sequences] == [(2, 0), (2, 1), (2, 2)]
    assert sequences[0].request.choices == sequences


def test_limits_come_from_request_model_and_blocks(state: State) -> None:
    assert sequences_of(state, ADMIT)[0].limit == 13
    endless = msgspec.structs.replace(ADMIT, sampling=Sampling(max_tokens=10**12))
    assert sequences_of(state, endless)[0].limit == 32


def test_salt_decides_the_root(state: State) -> None:
    salted = msgspec.structs.replace(ADMIT, cache_salt="tenant")
    assert sequences_of(state, salted)[0].request.root != sequences_of(state, ADMIT)[0].request.root


def test_a_prompt_that_leaves_no_room_for_output_is_too_long(state: State) -> None:
    fits = msgspec.structs.replace(ADMIT, tokens=pack_i32([1] * 31))
    assert sequences_of(state, fits)[0].limit == 32
    with pytest.raises(Reject) as caught:
        sequences_of(state, msgspec.structs.replace(ADMIT, tokens=pack_i32([1] * 32)))
    assert caught.value.reason is RejectReason.TOO_LONG and caught.value.param == "prompt"


def test_the_refusal_names_the_token(state: State) -> None:
    with pytest.raises(Reject, match="token -3 is outside the vocabulary of 100"):
        sequences_of(state, msgspec.structs.replace(ADMIT, tokens=pack_i32([1, -3, 200])))


def test_the_queue_is_bounded_by_sequences(state: State) -> None:
    with pytest.raises(Reject, match="0 of 8 places"):
        sequences_of(state, msgspec.structs.replace(ADMIT, n=9))


@pytest.mark.parametrize("origin", [-1, make_seq_id(0, 0, 9, 400)])
def test_what_was_aborted_here_may_come_back(origin: int) -> None:
    """Another scheduler went on with it for a while; a mere repeat does not bring it back."""
    core, seq_id = Harness.with_worker(), make_seq_id(0, 1, 9, 500)
    first = Admit(seq_id, pack_i32(ids(5)), Sampling(max_tokens=8), origin=origin)
    core.send(first)
    core.answer()
    core.send(Abort(seq_id))
    core.send(first)
    core.run()
    assert core.core.idle and core.finished.pop(seq_id).reason is FinishReason.ABORT
    core.tokens[seq_id] = [60, 61, 62]
    core.send(msgspec.structs.replace(first, output=pack_i32([60, 61, 62]), again=True))
    core.run()
    assert core.tokens[seq_id] == [60, 61, 62, *[PLAIN] * 5] and core.finished[seq_id].reason is FinishReason.LENGTH
    assert core.all_free()


def test_what_another_scheduler_accepted_is_not_refused_for_load() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting=1)
    core.admit(ids(4))
    core.admit(ids(4))
    moved = Admit(make_seq_id(0, 1, 9, 500), pack_i32(ids(5)), Sampling(max_tokens=2), again=True)
    core.send(moved)
    assert core.refused == []
    core.run()
    assert len(core.tokens[moved.seq_id]) == 2


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting_tokens=25)
    core.admit(ids(3), max_tokens=40)
    fits = core.message(ids(20), n=3)
    core.send(fits)
    assert core.core.load().waiting_tokens == 22  # choices share their prompt
    refused = core.admit(ids(5))
    assert [(each.seq_id, each.reason) for each in core.refused] == [(refused, "overloaded")]
    assert "22 prompt tokens wait" in core.refused[0].message
    core.admit(ids(3))
    core.run()
    assert core.core.load().waiting_tokens == 0
    core.admit(ids(3), max_tokens=40)
    core.admit(ids(30))  # nobody else waits
    assert len(core.refused) == 1


def test_what_was_accepted_before_is_not_refused_for_load() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting=2, max_waiting_tokens=10)
    core.admit(ids(3), max_tokens=40)
    core.send(*[core.message(ids(4)) for _ in range(2)])
    again = [msgspec.structs.replace(core.message(ids(9)), again=True) for _ in range(3)]
    core.send(*again)
    assert core.refused == [] and core.core.load().waiting == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", float("inf")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 1e300),
        ("top_k", 2**63),
        ("min_tokens", 2**64 - 1),
        ("logit_bias", ((5, float("nan")),)),
    ],
)
def test_numbers_that_would_end_the_worker_are_refused(state: State, field: str, value: object) -> None:
    sampling = msgspec.structs.replace(ADMIT.sampling, **{field: value})
    with pytest.raises(Reject, match=field.removeprefix("logit_")) as refusal:
        sequences_of(state, msgspec.structs.replace(ADMIT, sampling=sampling))
    assert refusal.value.param == field

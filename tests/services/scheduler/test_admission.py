"""What an Admit becomes."""

import msgspec
import pytest

from common.columns import pack_i32
from common.config import Kv, Scheduler
from common.errors import Reject, RejectReason
from common.protocol import Admit, ModelFacts, Sampling, WorkerReady
from services.scheduler.admission import sequences_of
from services.scheduler.state import State


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

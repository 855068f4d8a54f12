"""Token-level ends."""

import numpy as np
import pytest

from common.protocol import FinishReason, Sampling
from services.scheduler.ends import StopTokens


def flags(stops: StopTokens, *tokens: int) -> list[int]:
    return list(stops.flags(np.array(tokens, np.int32).view(np.uint32)))


def test_flags_follow_the_live_sequences() -> None:
    stops = StopTokens(10, (2,))
    one, two = Sampling(max_tokens=1, stop_token_ids=(5, 7)), Sampling(max_tokens=1, stop_token_ids=(5, 2))
    assert flags(stops, 2, 5, 7, 9) == [1, 0, 0, 0]
    stops.add(one)
    stops.add(two)
    assert flags(stops, 2, 5, 7, 9) == [1, 1, 1, 0]
    stops.remove(one)
    assert flags(stops, 2, 5, 7, 9) == [1, 1, 0, 0]
    stops.remove(two)
    assert flags(stops, 2, 5, 7, 9) == [1, 0, 0, 0]


@pytest.mark.parametrize("token", [10, -1, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_raises(token: int) -> None:
    with pytest.raises(IndexError):
        flags(StopTokens(10, (2,)), 1, token)


def test_stop_tokens_outside_the_vocabulary_are_harmless() -> None:
    stops = StopTokens(10, ())
    sampling = Sampling(max_tokens=1, stop_token_ids=(-1, 10, 10**9))
    stops.add(sampling)
    assert flags(stops, 9) == [0]
    stops.remove(sampling)


@pytest.mark.parametrize(
    ("sampling", "token", "index", "reason"),
    [
        (Sampling(max_tokens=9), 2, 0, FinishReason.EOS),
        (Sampling(max_tokens=9), 3, 0, None),
        (Sampling(max_tokens=9, ignore_eos=True), 2, 0, None),
        (Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(2,)), 2, 0, FinishReason.STOP_TOKEN),
        (Sampling(max_tokens=9, stop_token_ids=(3,)), 3, 4, FinishReason.STOP_TOKEN),
        (Sampling(max_tokens=9, min_tokens=4), 2, 3, None),
        (Sampling(max_tokens=9, min_tokens=4), 2, 4, FinishReason.EOS),
        (Sampling(max_tokens=9, min_tokens=4, stop_token_ids=(3,)), 3, 3, None),
    ],
)
def test_reason(sampling: Sampling, token: int, index: int, reason: FinishReason | None) -> None:
    assert StopTokens(10, (2,)).reason(sampling, token, index) is reason

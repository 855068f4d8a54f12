"""The queue: most urgent first, then first come first served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.protocol import Sampling
from services.scheduler.policy import Key
from services.scheduler.request import Request, Sequence
from services.scheduler.waiting import WaitingQueue


def sequence(key: Key) -> Sequence:
    request = Request(b"\1\0\0\0", 1, b"")
    return Sequence(key[1], request, Sampling(max_tokens=1), key, 2, bytearray(request.prompt))


def queue(*keys: Key) -> WaitingQueue:
    waiting = WaitingQueue()
    for key in keys:
        waiting.add(sequence(key))
    return waiting


def test_order_within_and_between_priorities() -> None:
    waiting = queue((1, 0), (0, 1), (0, 2), (-1, 3))
    assert [waiting.pop(0).key for _ in range(4)] == [(-1, 3), (0, 1), (0, 2), (1, 0)]
    assert len(waiting) == 0


def test_a_preempted_sequence_comes_back_to_the_front_of_its_priority() -> None:
    waiting = queue((0, 5), (0, 6), (-1, 9))
    waiting.add(sequence((0, 2)))
    assert [waiting.at(idx).key for idx in range(3)] == [(-1, 9), (0, 2), (0, 5)]


def test_removal_from_the_middle() -> None:
    waiting = queue((0, 0), (0, 1), (0, 2))
    gone = waiting.at(1)
    waiting.remove(gone)
    assert [waiting.at(idx).key for idx in range(2)] == [(0, 0), (0, 2)]
    with pytest.raises(KeyError):
        waiting.remove(gone)
    waiting.check({0, 2})


def test_check_finds_a_stranger() -> None:
    with pytest.raises(AssertionError, match="differs from WAITING"):
        queue((0, 0)).check(set())


@given(st.lists(st.integers(-2, 2)))
def test_any_arrivals_leave_in_order(priorities: list[int]) -> None:
    keys = [(priority, order) for order, priority in enumerate(priorities)]
    waiting = queue(*keys)
    assert [waiting.pop(0).key for _ in keys] == sorted(keys)

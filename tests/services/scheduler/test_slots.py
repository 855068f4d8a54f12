"""Row slots."""

import pytest

from common.columns import unpack_i32
from services.scheduler.slots import SlotPool


def test_low_slots_first_and_all_of_them() -> None:
    slots = SlotPool(3)
    assert [slots.take(), slots.take(), slots.take()] == [0, 1, 2]
    slots.check({0, 1, 2})
    assert slots.free == 0
    with pytest.raises(IndexError):
        slots.take()


def test_a_slot_given_back_can_be_taken_before_the_worker_is_told() -> None:
    slots = SlotPool(2)
    slots.take()
    slots.take()
    slots.give_back(0)
    slots.check({1})
    assert slots.take() == 0
    assert list(unpack_i32(slots.drain_removed())) == [0]
    assert slots.drain_removed() == b""


def test_check_finds_a_lost_and_a_double_slot() -> None:
    slots = SlotPool(2)
    slots.take()
    with pytest.raises(AssertionError, match="neither free nor taken"):
        slots.check(set())
    slots.give_back(0)
    with pytest.raises(AssertionError, match="free and taken"):
        slots.check({0})
    slots.give_back(0)
    with pytest.raises(AssertionError, match="free twice"):
        slots.check(set())

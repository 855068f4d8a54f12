"""The checks fail when the state is wrong: each damage is done to a healthy core and must be seen."""

from collections.abc import Callable

import pytest

from services.scheduler.request import Stage
from services.scheduler.state import State
from tests.services.scheduler.harness import Harness, ids


def stepping_row(state: State):
    return next(s.row for s in state.sequences.values() if s.stage is Stage.STEPPING)


def filling_row(state: State):
    return state.filling[0]


def lose_block(state: State) -> None:
    stepping_row(state).blocks.pop()


def double_block(state: State) -> None:
    blocks = stepping_row(state).blocks
    blocks.append(blocks[0])


def forget_waiting(state: State) -> None:
    first = state.waiting.first()
    assert first is not None
    state.waiting.remove(first)


def lose_row(state: State) -> None:
    stepping_row(state).sequence.row = None


def wrong_stage(state: State) -> None:
    stepping_row(state).sequence.stage = Stage.ENDING


def wrong_position(state: State) -> None:
    stepping_row(state).position_base += 1


def change_prompt(state: State) -> None:
    stepping_row(state).sequence.tokens[0] ^= 1


def empty_filling(state: State) -> None:
    state.filling = []


def publish_ahead(state: State) -> None:
    filling_row(state).published = 5


def free_taken_slot(state: State) -> None:
    assert state.worker is not None
    state.worker.slots.give_back(0)


def extra_plan(state: State) -> None:
    state.in_flight.append(state.in_flight[-1])


def unready(state: State) -> None:
    state.ready = False


def keep_finished(state: State) -> None:
    stepping_row(state).sequence.stage = Stage.FINISHED


@pytest.mark.parametrize(
    "damage",
    [
        lose_block,
        double_block,
        forget_waiting,
        lose_row,
        wrong_stage,
        wrong_position,
        change_prompt,
        empty_filling,
        publish_ahead,
        free_taken_slot,
        extra_plan,
        unready,
        keep_finished,
    ],
)
def test_damage_is_seen(damage: Callable[[State], None]) -> None:
    core = Harness.with_worker(max_rows=2, step_tokens=4)
    core.admit(ids(3), max_tokens=40)
    core.answer()
    core.admit(ids(30, 40))
    core.admit(ids(3, 70))
    core.answer()
    damage(core.core._state)
    with pytest.raises(AssertionError):
        core.core.check()

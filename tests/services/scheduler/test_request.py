"""A sequence's stages and its story."""

import itertools

import pytest

from common.protocol import Sampling
from services.scheduler.request import NEXT, STORY_LINES, IllegalTransition, Request, Sequence, Stage
from services.scheduler.tenants import Tenant


def sequence() -> Sequence:
    request = Request(b"\1\0\0\0\2\0\0\0", 2, b"")
    return Sequence(0xAB, request, Sampling(max_tokens=4), (0, 0), 6, bytearray(request.prompt), Tenant("", 1))


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Stage, Stage)))
def test_every_move_is_allowed_by_the_table_or_raises(old: Stage, new: Stage) -> None:
    one = sequence()
    one.stage = old
    if new in NEXT[old]:
        one.move(new, 1.0, "why")
        assert one.stage is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old.name} -> {new.name}"):
            one.move(new, 1.0, "why")
        assert one.stage is old


def test_nothing_follows_the_end() -> None:
    assert NEXT[Stage.FINISHED] == frozenset()


def test_an_illegal_move_tells_the_story() -> None:
    one = sequence()
    one.note(1.5, "admitted with care")
    with pytest.raises(IllegalTransition, match="admitted with care"):
        one.move(Stage.ENDING, 2.0, "too early")


def test_the_story_is_bounded_and_keeps_the_newest() -> None:
    one = sequence()
    for number in range(1000):
        one.note(float(number), f"event {number}")
    story = one.story()
    assert story[0] == f"{0xAB:#018x}"
    assert len(story) == STORY_LINES + 1 and story[-1].endswith("event 999")


def test_counts_follow_the_tokens() -> None:
    one = sequence()
    assert (one.known, one.num_output) == (2, 0)
    one.tokens += b"\7\0\0\0"
    assert (one.known, one.num_output) == (3, 1)

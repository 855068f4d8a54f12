from array import array

import pytest

from common.dialects.harmony import REASONING, WRITTEN
from common.dialects.think import THINK
from common.protocol import Sampling
from common.vocabulary import Vocabulary
from services.tokenizer.thinking import Thinking

WORDS = Vocabulary([bytes([byte]) for byte in range(256)])


def left(text: str, most: int = 100, until: int = 12, opened: bool = False) -> tuple[int, ...] | None:
    return Thinking(until, (1, 2, 3), THINK, opened).left(array("i", list(text.encode())), most, WORDS)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>abcde", False, (1, 2, 3)),
        ("abcdefghijkl", True, (1, 2, 3)),
        ("            ", True, (1, 2, 3)),
        ("ab</think>kl", True, ()),
        ("ab</think><t", True, ()),
        ("abcdefg</thi", True, (1, 2, 3)),
        ("abcdefghijkl", False, ()),
        ("the <think>a", False, ()),
    ],
)
def test_reasoning_that_is_open_is_ended(text: str, opened: bool, expected: tuple[int, ...]) -> None:
    assert left(text, opened=opened) == expected


def test_an_end_before_the_bound_or_at_the_limit_is_the_end() -> None:
    assert left("<think>abcd", opened=True) is None
    assert left("<think>abcde", most=12) is None
    assert left("<think>abcde", most=14) == (1, 2), "what the limit leaves"


def test_the_first_part_ends_at_the_bound() -> None:
    bound = Thinking(12, (), THINK, False)
    assert bound.first(Sampling(100, seed=3)) == Sampling(12, seed=3)
    assert bound.first(Sampling(10)) == Sampling(10)


def test_channels() -> None:
    begin, _ = WRITTEN
    bound = Thinking(36, (1,), REASONING, False)
    assert bound.left(array("i", list(f"{begin}well well".encode())), 100, WORDS) == (1,)
    assert bound.left(array("i", list("<|channel|>final<|message|>an answer".ljust(40).encode())), 100, WORDS) == ()

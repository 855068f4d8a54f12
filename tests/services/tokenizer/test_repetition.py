from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text_format import Repetition
from services.tokenizer.repetition import repeats


@pytest.mark.parametrize(
    ("tokens", "wanted", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], Repetition(2, 1, 3), True),
        ([1, 2, 1, 2, 1, 2], Repetition(2, 1, 4), False),
        ([1, 2, 1, 2, 1, 2], Repetition(1, 1, 2), False),
        ([3, 7, 7], Repetition(4, 1, 2), True),
        ([3, 7, 7], Repetition(4, 2, 2), False),
        ([7, 7, 3], Repetition(4, 1, 2), False),
        ([7, 7, 7, 7], Repetition(2, 2, 2), True),
        ([7], Repetition(1, 1, 2), False),
    ],
)
def test_examples(tokens: list[int], wanted: Repetition, expected: bool) -> None:
    assert repeats(array("i", tokens), len(tokens), wanted) is expected
    assert repeats(array("i", [*tokens, 9]), len(tokens), wanted) is expected, "what follows does not count"


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 5), st.integers(0, 4), st.integers(2, 4))
def test_it_is_what_it_says(tokens: list[int], smallest: int, more: int, times: int) -> None:
    sizes = range(smallest, smallest + more + 1)
    said = any(len(tokens) >= size * times and tokens[-size * times :] == tokens[-size:] * times for size in sizes)
    assert repeats(array("i", tokens), len(tokens), Repetition(smallest + more, smallest, times)) is said

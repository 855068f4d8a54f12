"""Outputs that go round in circles: the last tokens are one pattern several times. Pure, exact, and without a state."""

from array import array

from common.text_format import Repetition


def repeats(output: "array[int]", count: int, wanted: Repetition) -> bool:
    """Whether the first `count` tokens end with `min_count` times a pattern of `smallest` to `largest` tokens."""
    for size in range(wanted.smallest, min(wanted.largest, count // wanted.min_count) + 1):
        # Most sizes end here: the last token must be what it was one pattern before.
        if output[count - 1] == output[count - 1 - size]:
            begin = count - size * wanted.min_count
            if output[begin : count - size] == output[begin + size : count]:
                return True
    return False

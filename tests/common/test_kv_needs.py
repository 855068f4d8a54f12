"""The arithmetic of groups, by hand and against a row that is walked through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_needs import first_block, longest, needs, window_blocks
from common.protocol import KvGroup

FULL, STATE = KvGroup("full"), KvGroup("state", 1, every=32)


def test_a_window_is_behind_its_token() -> None:
    """Blocks of 4, a window of 6: the token at 9 sees 4 to 9, the one at 10 sees 5 to 10."""
    window = KvGroup("window", window=6)
    assert [first_block(window, position, 4) for position in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert first_block(FULL, 1000, 4) == 0
    assert first_block(KvGroup("window", window=1), 8, 4) == 2


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 20))
def test_no_row_ever_has_more_blocks_of_a_window(window: int, block_tokens: int, chunk: int) -> None:
    """In chunks, each after giving back; and in single tokens, giving back where a block begins."""
    group, most = KvGroup("window", window=window), 0
    for start in range(0, 200, chunk):
        most = max(most, -(-(start + chunk) // block_tokens) - first_block(group, start, block_tokens))
    assert most <= window_blocks(window, chunk, block_tokens)
    held = [position // block_tokens * block_tokens for position in range(200)]
    single = max(at // block_tokens + 1 - first_block(group, at, block_tokens) for at in held)
    assert single <= window_blocks(window, 0, block_tokens) <= single + 1, "and hardly fewer"


def test_needs_are_added_up_by_pool() -> None:
    groups = (FULL, KvGroup("window", window=6), KvGroup("window", 1, 100), KvGroup("state", 1, every=32))
    assert needs(groups, 2, 40, 4) == [10 + 4, 10 + 2]
    assert needs((FULL,), 1, 41, 4) == [11]


@pytest.mark.parametrize(
    ("groups", "pools", "tokens"),
    [
        ((FULL,), (10_000,), 8192),
        ((FULL,), (10,), 160),
        ((FULL, KvGroup("window", window=32)), (14,), 160),  # 4 of them for the window
        ((FULL, STATE), (10, 2), 160),
        ((FULL, STATE), (10, 1), 0),
        ((KvGroup("window", window=32),), (4,), 8192),
        ((KvGroup("window", window=32),), (3,), 48),
    ],
)
def test_the_longest_sequence_is_bounded_by_model_and_blocks(
    groups: tuple[KvGroup, ...], pools: tuple[int, ...], tokens: int
) -> None:
    assert longest(groups, pools, 8192, 16) == tokens

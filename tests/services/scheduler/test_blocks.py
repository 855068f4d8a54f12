"""Blocks in a tiny pool, with all invariants checked after every line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.columns import pack_i32
from services.scheduler.blocks import BlockPool, NoSpace, chain_root

ROOT = chain_root("", 1)


def tokens(*ids: int) -> bytearray:
    return bytearray(pack_i32(ids))


def pool() -> BlockPool:
    return BlockPool(num_blocks=8, block_tokens=4, hash_seed=1)


def published(blocks: BlockPool, ids: bytearray, root: bytes = ROOT) -> list[int]:
    """A table whose full blocks are all findable; used by nobody afterwards."""
    full = len(ids) // 16
    table = blocks.allocate(full)
    blocks.publish(table, 0, full, ids, root, [])
    blocks.release(table)
    return table


def test_allocation_and_release_return_to_the_start() -> None:
    blocks = pool()
    first = blocks.allocate(3)
    blocks.check([first])
    second = blocks.allocate(5)
    blocks.check([first, second])
    assert sorted(first + second) == list(range(8))
    assert blocks.free_blocks == 0 and blocks.used_blocks == 8
    blocks.release(first)
    blocks.check([second])
    blocks.release(second)
    blocks.check([])
    assert blocks.free_blocks == 8 and blocks.idle_blocks == 0


def test_allocating_nothing_takes_nothing() -> None:
    blocks = pool()
    assert blocks.allocate(0) == []
    blocks.check([])


def test_no_space_takes_nothing() -> None:
    blocks = pool()
    table = blocks.allocate(6)
    assert blocks.can_allocate(2) and not blocks.can_allocate(3)
    with pytest.raises(NoSpace, match="1 more blocks needed than"):
        blocks.allocate(3)
    blocks.check([table])
    assert blocks.free_blocks == 2


def test_a_shared_block_is_free_after_its_last_user() -> None:
    blocks = pool()
    first = blocks.allocate(2)
    blocks.share(first)
    blocks.check([first, first])
    assert blocks.references(first[0]) == 2
    blocks.release(first)
    blocks.check([first])
    assert blocks.free_blocks == 6
    blocks.release(first)
    blocks.check([])
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(first)


def test_a_released_prefix_is_found_until_its_blocks_are_needed() -> None:
    blocks = pool()
    ids = tokens(*range(8))
    table = published(blocks, ids)
    blocks.check([])
    assert blocks.idle_blocks == 2 and blocks.free_blocks == 8
    assert blocks.match(ids, 2, ROOT, []) == table
    assert blocks.match(ids, 1, ROOT, []) == table[:1]
    assert blocks.match(tokens(0, 1, 2, 3, 4, 5, 6, 99), 2, ROOT, []) == table[:1]
    assert blocks.match(tokens(1, 1, 2, 3), 1, ROOT, []) == []
    other = blocks.allocate(7)
    blocks.check([other])
    assert blocks.match(ids, 2, ROOT, []) == table[:1], "the end of a chain is evicted before its start"
    blocks.allocate(1)
    assert blocks.match(ids, 2, ROOT, []) == []


def test_the_longest_unused_prefix_is_evicted_first() -> None:
    blocks = BlockPool(2, 4, 1)
    old, new = tokens(1, 1, 1, 1), tokens(2, 2, 2, 2)
    published(blocks, old)
    published(blocks, new)
    touched = blocks.match(old, 1, ROOT, [])
    blocks.share(touched)
    blocks.check([touched])
    blocks.release(touched)
    blocks.check([])
    blocks.allocate(1)
    assert blocks.match(old, 1, ROOT, []) and not blocks.match(new, 1, ROOT, [])


def test_sharing_idle_blocks_takes_them_from_what_can_be_allocated() -> None:
    blocks = pool()
    found = published(blocks, tokens(*range(8)))
    assert blocks.free_after_share(found) == 6
    assert blocks.can_allocate(6, found) and not blocks.can_allocate(7, found)
    blocks.share(found)
    blocks.check([found])
    assert blocks.free_after_share(found) == blocks.free_blocks == 6


def test_equal_content_is_offered_once() -> None:
    blocks = pool()
    ids = tokens(1, 2, 3, 4)
    first, second = blocks.allocate(1), blocks.allocate(1)
    assert blocks.publish(first, 0, 1, ids, ROOT, []) == first
    assert blocks.publish(second, 0, 1, ids, ROOT, []) == []
    blocks.check([first, second])
    blocks.release(second)
    blocks.check([first])
    assert blocks.idle_blocks == 0
    assert blocks.match(ids, 1, ROOT, []) == first


def test_a_chain_is_continued_and_its_digests_are_kept() -> None:
    blocks = pool()
    ids = tokens(*range(12))
    chain: list[bytes] = []
    table = blocks.allocate(3)
    blocks.publish(table, 0, 1, ids, ROOT, chain)
    blocks.publish(table, 1, 3, ids, ROOT, chain)
    blocks.check([table])
    assert len(chain) == 3
    other: list[bytes] = []
    assert blocks.match(ids, 3, ROOT, other) == table
    assert other == chain


def test_equal_tokens_behind_different_beginnings_differ() -> None:
    blocks = pool()
    published(blocks, tokens(0, 0, 0, 0, 5, 5, 5, 5))
    assert blocks.match(tokens(1, 1, 1, 1, 5, 5, 5, 5), 2, ROOT, []) == []
    assert blocks.match(tokens(5, 5, 5, 5), 1, ROOT, []) == []


def test_salts_and_seeds_divide_the_cache() -> None:
    blocks = pool()
    ids = tokens(1, 2, 3, 4)
    published(blocks, ids, chain_root("a", 1))
    assert blocks.match(ids, 1, chain_root("a", 1), [])
    assert not blocks.match(ids, 1, chain_root("b", 1), [])
    assert chain_root("a", 1) != chain_root("a", 2)


def test_a_collision_of_digests_is_no_hit() -> None:
    blocks = pool()
    published(blocks, tokens(1, 2, 3, 4))
    chain = [next(iter(blocks._by_digest))]
    assert blocks.match(tokens(9, 9, 9, 9), 1, ROOT, chain) == []


def test_withdrawn_blocks_are_not_found_and_stay_with_their_users() -> None:
    blocks = pool()
    ids = tokens(*range(8))
    table = blocks.allocate(2)
    blocks.publish(table, 0, 2, ids, ROOT, [])
    blocks.withdraw(table[1:])
    blocks.check([table])
    assert blocks.match(ids, 2, ROOT, []) == table[:1]
    blocks.release(table)
    blocks.check([])
    assert blocks.idle_blocks == 1
    blocks.forget()
    blocks.check([])
    assert blocks.idle_blocks == 0 and blocks.free_blocks == 8


def test_fragmentation_is_unused_by_reserved_tokens() -> None:
    blocks = pool()
    assert blocks.fragmentation(0) == 0.0
    blocks.allocate(2)
    assert blocks.fragmentation(2) == 0.25


def test_check_finds_a_lost_block() -> None:
    blocks = pool()
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check([])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "publish", "withdraw"]), st.integers(0, 30))))
def test_any_order_of_calls_keeps_the_invariants(calls: list[tuple[str, int]]) -> None:
    blocks = pool()
    tables: list[list[int]] = []
    for call, number in calls:
        if call == "take" and blocks.can_allocate(number % 4):
            tables.append(blocks.allocate(number % 4))
        elif call == "share":
            ids = tokens(*([number % 3] * 16))
            found = blocks.match(ids, 4, ROOT, [])
            blocks.share(found)
            tables.append(found)
        elif tables:
            table = tables[number % len(tables)]
            if call == "release":
                blocks.release(tables.pop(number % len(tables)))
            elif call == "publish":
                blocks.publish(table, 0, len(table), tokens(*([number % 3] * 16)), ROOT, [])
            else:
                blocks.withdraw(table)
        blocks.check(tables)

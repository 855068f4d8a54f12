"""Prefixes that every group can go on from, against a search that tries them all."""

from hypothesis import given
from hypothesis import strategies as st

from common.columns import pack_i32
from common.kv_needs import first_block
from common.protocol import KvGroup
from services.scheduler.blocks import BlockPool, chain_root
from services.scheduler.prefixes import Hit, Prefixes
from services.scheduler.request import Row, Table

SIZE, MOST = 2, 10
ROOT = chain_root("", 1)
TOKENS = bytearray(pack_i32(range(SIZE * MOST)))
KINDS = st.one_of(
    st.just(KvGroup("full")),
    st.integers(1, 9).map(lambda window: KvGroup("window", window=window)),
    st.integers(1, 3).map(lambda blocks: KvGroup("state", every=blocks * SIZE)),
)


def offered(groups: list[KvGroup], there: list[set[int]]) -> tuple[Prefixes, list[dict[int, int]]]:
    """One pool in which each group has findable blocks at the given places; and which they are."""
    pool, found = BlockPool(len(groups) * MOST + 1, SIZE, 1), []
    for number, places in enumerate(there):
        blocks = dict(zip(sorted(places), pool.allocate(len(places)), strict=True))
        for idx, block in blocks.items():
            chain: list[bytes] = []
            pool.extend(TOKENS, idx, ROOT, chain)
            pool.publish([block], idx, idx + 1, TOKENS, ROOT, chain, number, idx)
        found.append(blocks)
    return Prefixes(groups, [pool]), found


def can_go_on(group: KvGroup, places: set[int], count: int) -> range | None:
    if group.kind == "state":
        return range(count - 1, count) if count - 1 in places and count * SIZE % group.every == 0 else None
    wanted = range(first_block(group, count * SIZE, SIZE), count)
    return wanted if places.issuperset(wanted) else None


@given(st.data())
def test_the_longest_one_is_found(data: st.DataObject) -> None:
    groups = [KvGroup("full"), *data.draw(st.lists(KINDS, max_size=3))] if data.draw(st.booleans()) else []
    groups = groups or [KvGroup("window", window=3), *data.draw(st.lists(KINDS, max_size=2))]
    likely = st.sets(st.integers(0, MOST - 1), min_size=data.draw(st.sampled_from((0, MOST - 2))), max_size=MOST)
    there = [data.draw(likely) for _ in groups]
    most = data.draw(st.integers(0, MOST))
    prefixes, blocks = offered(groups, there)
    everywhere = [[can_go_on(*each, count) for each in zip(groups, there, strict=True)] for count in range(1, most + 1)]
    counts = [count for count, each in enumerate(everywhere, 1) if None not in each]
    hit = prefixes.match(TOKENS, most, ROOT, [])
    assert hit.num_blocks == max(counts, default=0)
    for number, (group, places) in enumerate(zip(groups, there, strict=True)):
        wanted = can_go_on(group, places, hit.num_blocks) if hit.num_blocks else ()
        assert list(hit.tables[number]) == [blocks[number][idx] for idx in wanted or ()]


def test_groups_of_one_pool_do_not_find_each_others_blocks() -> None:
    groups = [KvGroup("full"), KvGroup("window", window=3)]
    prefixes, _ = offered(groups, [set(range(4)), set()])
    assert prefixes.match(TOKENS, 4, ROOT, []) == Hit(0, ((), ()))


def test_a_donor_whose_window_has_gone_on_has_nothing_to_share() -> None:
    groups = [KvGroup("full"), KvGroup("window", window=4)]
    prefixes = Prefixes(groups, [BlockPool(20, SIZE, 1)])
    row = Row(None, 0, [1, 2, 3, 4], 8, 0, tables=[Table([1, 2, 3, 4]), Table([7, 8, 9], 1)])  # type: ignore[arg-type]
    assert prefixes.of_donor(row, 3, 7) == Hit(3, ([1, 2, 3], [8]), row)  # 7 sees 4 to 7: blocks 2 and 3
    row.tables[1] = Table([9], 3)
    assert prefixes.of_donor(row, 3, 7) is None
    stateful = Prefixes([KvGroup("full"), KvGroup("state", every=2)], [BlockPool(20, SIZE, 1)])
    assert stateful.of_donor(row, 3, 7) is None

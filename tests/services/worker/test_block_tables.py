import numpy as np
import torch

from common.columns import pack_i32
from common.protocol import KvGroup, RowTable
from services.worker.block_tables import BlockTables, GroupTables, places_of

CPU = torch.device("cpu")


def test_grown_blocks_follow_in_order() -> None:
    """Also of slots that come often and by turns."""
    source = np.random.default_rng(0)
    tables = BlockTables(KvGroup("full"), 5, 60, CPU)
    tables.start(3, RowTable(2, pack_i32([70, 71])))
    wanted: list[list[int]] = [[], [], [], [0, 0, 70, 71], []]
    for size in (1, 40, 7):
        slots, blocks = source.integers(0, 5, size).tolist(), source.integers(1, 900, size).tolist()
        tables.grow(pack_i32(slots), pack_i32(blocks))
        for slot, block in zip(slots, blocks, strict=True):
            wanted[slot].append(block)
    assert [tables.tables[slot, : len(row)].tolist() for slot, row in enumerate(wanted)] == wanted
    assert tables.num_blocks.tolist() == [len(row) for row in wanted]


def test_tables_of_all_groups_of_pages_are_read_at_once() -> None:
    groups = (KvGroup("window", window=4), KvGroup("state", 1, every=8), KvGroup("full", 2))
    tables = GroupTables.of(groups, 4, 6, CPU)
    state, full = tables.beside
    for each, blocks in ((tables.first, [7, 8, 9]), (full, [3, 4]), (state, [1])):
        each.start(2, RowTable(0, pack_i32(blocks)))
    slots, positions = np.array([2, 2]), np.array([3, 9])
    assert places_of(tables.pages, slots, positions, 8).tolist() == [[59, 65], [27, 33]]
    assert tables.blocks(np.array([2, 1])).tolist() == [2, 0], "a state has no tokens"
    assert state.tables.shape == (4, 1) and state.tables[2, 0] == 1

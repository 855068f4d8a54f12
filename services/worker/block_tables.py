"""Block tables of a worker's rows, one for each group of layers. Owner: `Rows`, by `Rows.apply`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.protocol import KvGroup, RowStart, RowTable, StepPlan
from services.worker import memory
from services.worker.draft_state import scatter

Ints = npt.NDArray[np.int64]


class BlockTables:
    """Block tables of one group. Entries before a window are whatever they were."""

    def __init__(self, group: KvGroup, max_rows: int, width: int, device: torch.device) -> None:
        self.group = group
        self.is_state = group.kind == "state"
        width = 1 if self.is_state else width
        self.tables = np.zeros((max_rows, width), np.int32)
        self.num_blocks = np.zeros(max_rows, np.int64)
        # Live blocks of states go to the device with every step.
        on_host = self.is_state or device.type == "cpu"
        self.resident = None if on_host else memory.zeros((max_rows + 1, width), torch.int32, device)

    def start(self, slot: int, table: RowTable) -> None:
        blocks = np.frombuffer(table.blocks, np.int32)
        end = table.first + len(blocks)
        self.tables[slot, table.first : end] = blocks
        self.num_blocks[slot] = end

    def grow(self, slots: bytes, blocks: bytes) -> None:
        """_i32, as in a plan."""
        order = np.argsort(grown := np.frombuffer(slots, np.int32), kind="stable")
        grown = grown[order]
        places = self.num_blocks[grown] + np.arange(len(grown)) - np.searchsorted(grown, grown)
        self.tables[grown, places] = np.frombuffer(blocks, np.int32)[order]
        self.num_blocks[grown] = places + 1  # of equal slots the last one stays

    def upload(self, slots: bytes) -> None:
        """All blocks of these rows (_i32) to the device, if it has tables."""
        if self.resident is not None:
            each = np.unique(np.frombuffer(slots, np.int32).astype(np.int64))
            places = np.concatenate([slot * self.tables.shape[1] + np.arange(self.num_blocks[slot]) for slot in each])
            scatter(self.resident, [places], [self.tables.reshape(-1)[places]])


def places_of(tables: npt.NDArray[np.int32], slots: Ints, positions: Ints, block_tokens: int) -> Ints:
    """Where the token at `positions` of each slot has its key and value, by tables [..., max_rows, width]."""
    block, offset = np.divmod(positions, block_tokens)
    return tables[..., slots, block] * np.int64(block_tokens) + offset


class GroupTables(NamedTuple):
    first: BlockTables
    beside: list[BlockTables]
    pages: npt.NDArray[np.int32]  # [G, max_rows, width]: the tables of all groups of pages, to be read at once

    @classmethod
    def of(cls, groups: Sequence[KvGroup], max_rows: int, width: int, device: torch.device) -> "GroupTables":
        """`groups`: as in ModelFacts."""
        made = [BlockTables(group, max_rows, width, device) for group in groups or (KvGroup("full"),)]
        paged = [each for each in made if not each.is_state]
        pages = np.zeros((len(paged), max_rows, width), np.int32)
        for each, tables in zip(paged, pages, strict=True):
            each.tables = tables
        return cls(made[0], made[1:], pages)

    def grow(self, plan: StepPlan, upload: bool) -> None:
        """What a plan gives to rows. upload: the device needs it before the step that uses it."""
        first = [(self.first, plan.grown_slots, plan.grown_blocks)] if plan.grown_slots else []
        more = [(self.beside[growth.group - 1], growth.slots, growth.blocks) for growth in plan.grown]
        for tables, slots, blocks in (*first, *more):
            tables.grow(slots, blocks)
            if upload and slots:
                tables.upload(slots)

    def blocks(self, slots: Ints) -> Ints:
        """How many these rows have in every group of pages."""
        found = self.first.num_blocks[slots]
        for more in self.beside:
            if not more.is_state:
                found = np.minimum(found, more.num_blocks[slots])
        return found


def upload_tables(resident: Tensor, added: Sequence[RowStart], tables: Sequence[RowTable]) -> None:
    blocks = [np.frombuffer(table.blocks, np.int32) for table in tables]
    starts = [row.slot * resident.shape[1] + table.first for row, table in zip(added, tables, strict=True)]
    entries = [np.arange(len(ids)) + start for start, ids in zip(starts, blocks, strict=True)]
    scatter(resident, entries, blocks)

"""Which prefix a sequence may share so that every group of layers can go on from its end. Reads the pools only.

A full group needs all blocks of the prefix, a window those that the next token reads, a state a checkpoint exactly at
the end. Called by the planner, and by the fleet to compare groups of workers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.kv_needs import first_block
from common.protocol import KvGroup
from services.scheduler.blocks import BlockPool
from services.scheduler.request import Row


class Hit(NamedTuple):
    """Leading blocks of a sequence from which every group can go on, and what a row shares of each group then."""

    num_blocks: int
    tables: tuple[Sequence[int], ...]  # the last ones before the end; of a state the checkpoint
    donor: Row | None = None  # a row that has the tokens behind them too, all but one


class Prefixes:
    def __init__(self, groups: Sequence[KvGroup], pools: Sequence[BlockPool]) -> None:
        self.groups, self.pools = groups, pools
        self.block_tokens = pools[0].block_tokens
        self._full = [idx for idx, group in enumerate(groups) if group.kind == "full"]
        # a state's checkpoints are few, so it is asked first
        self._others = sorted(set(range(len(groups))) - set(self._full), key=lambda idx: groups[idx].kind)
        self.nothing = Hit(0, ((),) * len(groups))

    def _pool(self, group: int) -> BlockPool:
        return self.pools[self.groups[group].pool]

    def match(self, tokens: bytes | bytearray, most: int, root: bytes, chain: list[bytes]) -> Hit:
        """The longest prefix that can be shared, of at most `most` blocks. Takes nothing; `chain` as for BlockPool."""
        found: dict[int, list[int]] = {}
        count = max(most, 0)
        for group in self._full:
            found[group] = self._pool(group).match(tokens, count, root, chain, group)
            count = len(found[group])
        if len(found) == len(self.groups):
            return Hit(count, tuple(found[group][:count] for group in found))
        self.pools[0].extend(tokens, count, root, chain)
        while count and (lacking := self._lacking(tokens, count, root, chain)) < count:
            count = lacking
        if not count:
            return self.nothing
        for group in range(len(self.groups)):
            if group not in found:
                first = self._first(group, count)
                wanted = (self._pool(group).find(tokens, idx, root, chain, group) for idx in range(first, count))
                found[group] = [block for block in wanted if block is not None]
        return Hit(count, tuple(found[group][:count] for group in range(len(self.groups))))

    def _first(self, group: int, count: int) -> int:
        """The first block that a row needs which goes on behind `count` blocks."""
        if self.groups[group].kind == "state":
            return count - 1
        return first_block(self.groups[group], count * self.block_tokens, self.block_tokens)

    def _lacking(self, tokens: bytes | bytearray, count: int, root: bytes, chain: list[bytes]) -> int:
        """How many blocks may be shared at most, where not all groups can go on behind `count`; else `count`."""
        for group in self._others:
            if self.groups[group].kind == "state":
                step = self.groups[group].every // self.block_tokens
                if count % step:
                    return count - count % step
            for idx in range(count - 1, self._first(group, count) - 1, -1):
                if self._pool(group).find(tokens, idx, root, chain, group) is None:
                    return idx
        return count

    def of_donor(self, row: Row, num_blocks: int, computed: int) -> Hit | None:
        """What a sibling may share that goes on at position `computed`; None if `row` does not have it any more."""
        if any(group.kind == "state" for group in self.groups):
            return None  # its state has gone on
        tables = []
        for group, table in enumerate(row.tables):
            first = first_block(self.groups[group], computed, self.block_tokens)
            if table.first > first:
                return None
            tables.append(table.blocks[first - table.first : num_blocks - table.first])
        return Hit(num_blocks, tuple(tables), row)

"""The block tables of rows, one per group of layers, over pools of blocks. Owned by the core's state.

A full table keeps all its blocks. A window's gives back what no later token reads, before a step, since that step is
planned to run after all that read it. A state's has one block, the live one; checkpoints are copies of it that the
index keeps. With one full group, the common case, `tables[0].blocks` is all there is. Invariants (`check`): a table
ends where its row's tokens do; what rows get is told in the plan that is being made.
"""

import math
from collections.abc import Iterable, Sequence

from common.kv_needs import first_block, window_blocks
from common.protocol import KvGroup, ModelFacts
from services.scheduler import policy
from services.scheduler.blocks import BlockPool
from services.scheduler.changes import Changes, Columns
from services.scheduler.kv_events import KvLog, pools_of
from services.scheduler.prefixes import Hit, Prefixes
from services.scheduler.request import Row, Table


class KvGroups:
    def __init__(self, facts: ModelFacts, hash_seed: int, chunk: int, plans: int = 1, log: KvLog | None = None) -> None:
        """`chunk`: the most tokens of a row in a step; `plans`: in flight at once; `log`: hears what can be found."""
        self.groups = facts.groups or (KvGroup("full"),)
        self.block_tokens = facts.block_tokens
        blocks = (facts.num_blocks, *facts.pools)
        self.pools = pools_of(blocks, facts, hash_seed, log)
        self.plain = [group.kind for group in self.groups] == ["full"]
        numbered = list(enumerate(self.groups))
        self._windows = [idx for idx, group in numbered if group.kind == "window"]
        self._states = [idx for idx, group in numbered if group.kind == "state"]
        self.has_windows = bool(self._windows)
        self.every = math.gcd(*(self.groups[idx].every for idx in self._states))  # tokens between checkpoints, 0: none
        self._paged = [idx for idx, group in numbered if group.kind != "state"]
        self.prefixes = Prefixes(self.groups, self.pools)
        self._per_pool = [sum(self.groups[idx].pool == pool for idx in self._paged) for pool in range(len(blocks))]
        self.chunk, self._plans = chunk, plans
        self.changes = Changes()

    def _pool(self, group: int) -> BlockPool:
        return self.pools[self.groups[group].pool]

    # Admission

    def _needed(self, hit: Hit, known: int, chunk: int) -> list[int]:
        """Blocks of each pool that a row must get besides those it shares, to begin with chunks of so many tokens."""
        found = [0] * len(self.pools)
        total = -(-known // self.block_tokens)
        for idx, group in enumerate(self.groups):
            if group.kind == "state":
                found[group.pool] += 1
            elif group.kind == "window":
                most = window_blocks(group.window, min(chunk, known), self.block_tokens)
                found[group.pool] += max(min(total - hit.num_blocks, most - len(hit.tables[idx])), 0)
            else:
                found[group.pool] += total - hit.num_blocks
        return found

    def _shared(self, hit: Hit) -> list[list[int]]:
        """By pool."""
        shared: list[list[int]] = [[] for _ in self.pools]
        for group, blocks in zip(self.groups, hit.tables, strict=True):
            shared[group.pool] += blocks
        return shared

    def may_admit(self, hit: Hit, known: int, running: int) -> bool:
        """Whether a row of `known` tokens that shares `hit` may begin beside `running` others."""
        needed = self._needed(hit, known, self.chunk if running else 0)
        ahead = (running + 1) * (self._plans + 1) // self.block_tokens
        return all(
            policy.may_admit(need, pool.free_after_share(blocks), pool.num_blocks, running, ahead * tables)
            for need, pool, blocks, tables in zip(needed, self.pools, self._shared(hit), self._per_pool, strict=True)
        )

    def missing_tokens(self, hit: Hit, known: int) -> int:
        """Tokens of cache that others must give up before such a row may begin."""
        needed = self._needed(hit, known, self.chunk)
        lack = [
            need - pool.free_after_share(blocks)
            for need, pool, blocks in zip(needed, self.pools, self._shared(hit), strict=True)
        ]
        return sum(max(blocks, 0) for blocks in lack) * self.block_tokens

    def take(self, hit: Hit, known: int) -> list[Table]:
        """A new row's tables; there must be space. Windows get their blocks chunk by chunk."""
        tables: list[Table] = []
        for group, blocks in zip(self.groups, hit.tables, strict=True):
            self.pools[group.pool].share(blocks)
        for idx, (group, blocks) in enumerate(zip(self.groups, hit.tables, strict=True)):
            pool = self.pools[group.pool]
            if group.kind == "state":
                live = pool.allocate(1)
                for checkpoint in blocks:
                    self.changes.copy(group.pool, checkpoint, live[0])
                    self.changes.hold(group.pool, checkpoint)
                tables.append(Table(live))
                continue
            rest = hit.donor is not None and (known - 1) % self.block_tokens > 0
            more = int(rest) if group.kind == "window" else -(-known // self.block_tokens) - hit.num_blocks
            table = Table([*blocks, *pool.allocate(more)], hit.num_blocks - len(blocks))
            if rest and hit.donor is not None:
                theirs = hit.donor.tables[idx]
                source, target = (each.blocks[hit.num_blocks - each.first] for each in (theirs, table))
                self.changes.copy(group.pool, source, target)
            tables.append(table)
        return tables

    # Steps

    def can_grow(self, rows: int) -> bool:
        """Whether so many rows can get one more block in each of their tables of pages."""
        if self.plain:
            return self.pools[0].can_allocate(rows)
        return all(
            pool.can_allocate(rows * tables) for pool, tables in zip(self.pools, self._per_pool, strict=True) if tables
        )

    def grow(self, rows: Sequence[Row]) -> list[int]:
        """One more block in each table of pages; returns those of the first group."""
        blocks = self.pools[0].allocate(len(rows))
        for row, block in zip(rows, blocks, strict=True):
            row.blocks.append(block)
        if not self.plain:
            slots = [row.slot for row in rows]
            for group in self._paged[1:]:
                more = self._pool(group).allocate(len(rows))
                for row, block in zip(rows, more, strict=True):
                    row.tables[group].blocks.append(block)
                self.changes.grow(group, slots, more)
        return blocks

    def _append(self, group: int, row: Row, blocks: list[int]) -> None:
        row.tables[group].blocks += blocks
        self.changes.grow(group, [row.slot] * len(blocks), blocks)

    def slide(self, row: Row, position: int) -> None:
        """Gives back what no token from `position` on reads."""
        for group in self._windows:
            table = row.tables[group]
            count = min(first_block(self.groups[group], position, self.block_tokens) - table.first, len(table.blocks))
            if count > 0:
                self._pool(group).release(table.blocks[:count])
                del table.blocks[:count]
                table.first += count

    def room(self, row: Row, most: int) -> int:
        """Tokens, at most `most`, that the row's next chunk may have: windows get blocks, a checkpoint ends it."""
        if self.plain:
            return most
        start = row.scheduled
        self.slide(row, start)
        for group in self._states:
            most = min(most, self.groups[group].every - start % self.groups[group].every)
        for group in self._windows:
            number = self.groups[group].pool
            blocks = self.pools[number].free_blocks // self._windows_of(number)
            most = min(most, (row.tables[group].end + blocks) * self.block_tokens - start)
        return most

    def _windows_of(self, pool: int) -> int:
        return sum(self.groups[group].pool == pool for group in self._windows)

    def advance(self, row: Row, count: int) -> None:
        """Before a chunk of `count` tokens, which `room` allows; the row is not brought up to it yet."""
        for group in self._windows:
            lacking = -(-(row.scheduled + count) // self.block_tokens) - row.tables[group].end
            if lacking > 0:
                self._append(group, row, self._pool(group).allocate(lacking))

    def save(self, row: Row, position: int) -> None:
        """A checkpoint of what the row's first `position` tokens leave, before a step that goes on from there.

        Only where there is one to be made, and a block for it that nobody uses.
        """
        sequence, idx = row.sequence, position // self.block_tokens - 1
        for group in self._states:
            pool = self._pool(group)
            if not position or position % self.groups[group].every or not pool.can_allocate(1):
                continue
            known = sequence.tokens, idx, sequence.request.root, sequence.chain
            if idx < len(sequence.chain) and pool.find(*known, group) is not None:
                continue
            number = self.groups[group].pool
            block = pool.allocate(1)[0]
            self.changes.copy(number, row.tables[group].blocks[0], block)
            row.saved.append((group, idx + 1, block))
            self.changes.save(self._label(number, block))

    def drain(self) -> Columns:
        """What rows have got since the last call, for a plan."""
        for pool, block in self.changes.held:
            self.pools[pool].release((block,))
        return self.changes.drain()

    # Publication

    def publish(self, row: Row, first: int, last: int) -> list[int]:
        """Offers blocks first .. last - 1 of the row, and its checkpoints up to there. Returns their labels."""
        sequence = row.sequence
        tokens, root, chain = sequence.tokens, sequence.request.root, sequence.chain
        if self.plain:
            return self.pools[0].publish(row.blocks, first, last, tokens, root, chain)
        self.pools[0].extend(tokens, last, root, chain)
        labels = []
        for group in self._paged:
            table, number = row.tables[group], self.groups[group].pool
            begin = max(first, table.first)
            if begin >= last:
                continue
            published = self.pools[number].publish(table.blocks, begin, last, tokens, root, chain, group, table.first)
            labels += [self._label(number, block) for block in published]
        return labels + self._publish_saved(row, last)

    def _publish_saved(self, row: Row, last: int) -> list[int]:
        sequence, labels = row.sequence, []
        for group, num_blocks, block in [saved for saved in row.saved if saved[1] <= last]:
            row.saved.remove((group, num_blocks, block))
            pool, number = self._pool(group), self.groups[group].pool
            part = num_blocks - 1, num_blocks, sequence.tokens, sequence.request.root, sequence.chain
            labels += [self._label(number, each) for each in pool.publish([block], *part, group, num_blocks - 1)]
            pool.release((block,))
        return labels

    def _label(self, pool: int, block: int) -> int:
        """A block's number among those of all pools."""
        return block * len(self.pools) + pool

    def withdraw(self, labels: Iterable[int]) -> None:
        """These blocks' content cannot be trusted: nobody finds them any more."""
        for label in labels:
            block, pool = divmod(label, len(self.pools))
            self.pools[pool].withdraw((block,))

    # The end

    def release(self, row: Row) -> None:
        """The row gives back all its blocks."""
        for group, table in enumerate(row.tables):
            self._pool(group).release(table.blocks)
        for group, _, block in row.saved:
            self._pool(group).release((block,))
        row.saved.clear()

    def forget(self) -> None:
        """No block's content exists any more."""
        for pool in self.pools:
            pool.forget()

    def unused_tokens(self, row: Row, scheduled: int) -> int:
        """Tokens for which the row has blocks but that it has not reached, of all its tables."""
        ends = (row.tables[group].end for group in self._paged)
        return sum(end * self.block_tokens - scheduled for end in ends)

    def fragmentation(self, unused_tokens: int) -> float:
        """Reserved but unused KV tokens / reserved KV tokens; 0 with nothing reserved."""
        used = sum(pool.used_blocks for pool, tables in zip(self.pools, self._per_pool, strict=True) if tables)
        return unused_tokens / (used * self.block_tokens) if used else 0.0

    def check(self, rows: Sequence[Row]) -> None:
        """Asserts the invariants of all pools, and that nothing waits for a plan, given all rows."""
        assert not self.changes.any, "a plan was made without its blocks"
        for number, pool in enumerate(self.pools):
            tables = [
                table.blocks
                for row in rows
                for group, table in zip(self.groups, row.tables, strict=True)
                if group.pool == number
            ]
            saved = [[block] for row in rows for group, _, block in row.saved if self.groups[group].pool == number]
            pool.check([*tables, *saved])

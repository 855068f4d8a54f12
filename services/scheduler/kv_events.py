"""What becomes findable in the prefix caches of all worker groups, and what ceases to be: for routers outside. Pure.

Only with `kv.events_endpoint`: pools are then `ToldPool`s, which add to the one `KvLog` of their fleet. Seen from
outside a scheduler is one cache: a block is stored when the first group offers it, and removed when no group does any
more. `drain` gives vLLM's events; its invariant is that all events so far make up exactly what `check` finds.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.columns import unpack_i32
from common.protocol import KvGroup, ModelFacts
from services.scheduler.blocks import DIGEST_BYTES, BlockPool

Place = tuple[int, bytes]  # group of layers, digest
KINDS = {"full": "full_attention", "window": "sliding_window", "state": "mamba"}  # in vLLM's words


class Stored(NamedTuple):
    """Blocks of one chain that became findable; `parent` is the digest before them, None at the start of a prompt."""

    group: int
    digests: list[bytes]
    parent: bytes | None
    root: bytes  # of blocks without a parent: what their chain starts from
    tokens: list[int]


class Removed(NamedTuple):
    group: int
    digests: list[bytes]


class Cleared(NamedTuple):
    """Nothing is findable any more."""


KvEvent = Stored | Removed | Cleared


class KvLog:
    def __init__(self) -> None:
        self.groups: Sequence[KvGroup] = ()  # of the newest pools; all fleets' pools have the same
        self.block_tokens = 0
        self._holders: dict[Place, int] = {}  # pools that offer it
        self._events: list[Stored | Removed] = []

    def stored(self, group: int, digest: bytes, key: bytes) -> None:
        """`key`: parent digest, or root, and the block's tokens, as BlockPool keeps it."""
        place = group, digest
        holders = self._holders.get(place, 0)
        self._holders[place] = holders + 1
        if holders:
            return
        parent, tokens = key[: -self.block_tokens * 4], unpack_i32(key[-self.block_tokens * 4 :]).tolist()
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.group == group and last.digests[-1] == parent:
            last.digests.append(digest)
            last.tokens.extend(tokens)
            return
        is_root = len(parent) > DIGEST_BYTES
        self._events.append(Stored(group, [digest], None if is_root else parent, parent if is_root else b"", tokens))

    def removed(self, group: int, digest: bytes) -> None:
        place = group, digest
        holders = self._holders[place] - 1
        if holders:
            self._holders[place] = holders
            return
        del self._holders[place]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and last.group == group:
            last.digests.append(digest)
        else:
            self._events.append(Removed(group, [digest]))

    def drain(self) -> Sequence[KvEvent]:
        """All events since the call before, in order."""
        events = self._events
        if events:
            self._events = []
            if not self._holders:
                return [Cleared()]
        return events

    def check(self, pools: Iterable["ToldPool"]) -> None:
        """Asserts that it counts what the pools offer."""
        found: dict[Place, int] = {}
        for pool in pools:
            for place in pool.offered():
                found[place] = found.get(place, 0) + 1
        assert found == self._holders, "the log of KV events differs from the prefix indexes"


class ToldPool(BlockPool):
    """A pool that tells the log what can be found in it."""

    def __init__(self, num_blocks: int, block_tokens: int, hash_seed: int, log: KvLog) -> None:
        super().__init__(num_blocks, block_tokens, hash_seed)
        self._log = log

    def publish(
        self,
        blocks: Sequence[int],
        first: int,
        last: int,
        tokens: bytearray,
        root: bytes,
        chain: list[bytes],
        group: int = 0,
        missing: int = 0,
    ) -> list[int]:
        published = super().publish(blocks, first, last, tokens, root, chain, group, missing)
        for block in published:
            self._tell(block, group)
        return published

    def publish_one(self, block: int, key: bytes) -> bytes:
        findable = self._keys[block] is not None
        digest = super().publish_one(block, key)
        if not findable and self._keys[block] is not None:
            self._tell(block, 0)
        return digest

    def _tell(self, block: int, group: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._log.stored(group, self._digests[block], key)

    def _unlist(self, block: int) -> None:
        home = self._homes[block]
        group = 0 if home is None else next(group for group, index in self._indexes.items() if index is home)
        super()._unlist(block)
        self._log.removed(group, self._digests[block])

    def offered(self) -> list[Place]:
        return [(group, digest) for group, index in self._indexes.items() for digest in index]


def pools_of(blocks: Sequence[int], facts: ModelFacts, hash_seed: int, log: KvLog | None) -> list[BlockPool]:
    """Pools of so many blocks each."""
    if log is None:
        return [BlockPool(number, facts.block_tokens, hash_seed) for number in blocks]
    log.groups, log.block_tokens = facts.groups or (KvGroup("full"),), facts.block_tokens
    return [ToldPool(number, facts.block_tokens, hash_seed, log) for number in blocks]

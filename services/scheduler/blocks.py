"""KV blocks: who holds them, which are free, and which hold a prefix that can be used again.

Owned by the core's state; the planner takes and publishes, releases give back. Invariants (`check`): a block is in
use (references > 0), idle (0 references, findable by its digest, evicted oldest first) or free (holds nothing).
The digest of a block chains over all tokens before it: xxh3_128(parent digest + token bytes); the hashed bytes are
kept and compared on a hit, so that a collision cannot hand out another prompt's KV. Groups of layers that share a pool
have an index each; `group` may be left out for the first one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from xxhash import xxh3_128_digest

TOKEN_BYTES = 4
DIGEST_BYTES = 16


class NoSpace(Exception):
    """Fewer blocks can be had than were asked for; ask `can_allocate` first."""


def chain_root(cache_salt: str, hash_seed: int) -> bytes:
    """What a chain starts from. Requests with different salts never share blocks.

    It is longer than a digest, so that a block's key tells whether it is the first one.
    """
    digest: bytes = xxh3_128_digest(cache_salt.encode(errors="surrogatepass"), hash_seed)
    return digest + b"^"


class BlockPool:
    """Blocks 0 .. num_blocks - 1 of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, block_tokens: int, hash_seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._hash_seed = hash_seed
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._by_digest: dict[bytes, int] = {}  # of the first group
        self._indexes: dict[int, dict[bytes, int]] = {0: self._by_digest}  # of each group
        # What a findable block holds: parent digest + token bytes, and the digest of these.
        self._keys: list[bytes | None] = [None] * num_blocks
        self._digests: list[bytes] = [b""] * num_blocks
        self._homes: list[dict[bytes, int] | None] = [None] * num_blocks  # the index that has it, if not the first

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle_blocks(self) -> int:
        """Unused blocks that hold a prefix."""
        return len(self._idle)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    def references(self, block: int) -> int:
        return self._references[block]

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `allocate(count)` succeeds after `share(shared)`."""
        return count <= (self.free_after_share(shared) if shared else len(self._free) + len(self._idle))

    def free_after_share(self, shared: Sequence[int]) -> int:
        """`free_blocks` after `share(shared)`: idle blocks that get shared are no longer there to be taken."""
        references = self._references
        return self.free_blocks - [references[block] for block in shared].count(0)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each; the oldest idle prefix goes only when no block is empty.

        Raises NoSpace, and then takes nothing.
        """
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        taken = free[-count:] if count else []
        del free[len(free) - count :]
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, count: int) -> None:
        if count > len(self._idle):
            raise NoSpace(f"{count} more blocks needed than the {self.free_blocks} that can be had")
        idle, free = self._idle, self._free
        for _ in range(count):
            block, _ = idle.popitem(last=False)
            self._unlist(block)
            free.append(block)

    def _unlist(self, block: int) -> None:
        """Nobody finds the block any more."""
        home = self._homes[block]
        if home is None:
            home = self._by_digest
        else:
            self._homes[block] = None
        del home[self._digests[block]]
        self._keys[block] = None

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each of these blocks, which must be in use or idle."""
        references, idle = self._references, self._idle
        for block in blocks:
            if references[block] == 0:
                del idle[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One user less. The last blocks of a chain become idle first, so they are also evicted first."""
        references, keys, free, idle = self._references, self._keys, self._free, self._idle
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            references[block] = left
            if left == 0:
                if keys[block] is None:
                    free.append(block)
                else:
                    idle[block] = None

    def extend(self, tokens: bytes | bytearray, count: int, root: bytes, chain: list[bytes]) -> None:
        """Appends the digests that `chain` lacks of the first `count` blocks of `tokens`."""
        width = self.block_tokens * TOKEN_BYTES
        parent = chain[-1] if chain else root
        for idx in range(len(chain), count):
            parent = xxh3_128_digest(parent + tokens[idx * width : (idx + 1) * width], self._hash_seed)
            chain.append(parent)

    def find(self, tokens: bytes | bytearray, idx: int, root: bytes, chain: list[bytes], group: int) -> int | None:
        """The findable block that holds block `idx` of `tokens`, whose digests `chain` has that far."""
        block = self._indexes.get(group, {}).get(chain[idx])
        width = self.block_tokens * TOKEN_BYTES
        key = (chain[idx - 1] if idx else root) + tokens[idx * width : (idx + 1) * width]
        return None if block is None or self._keys[block] != key else block

    def match(self, tokens: bytes | bytearray, most: int, root: bytes, chain: list[bytes], group: int = 0) -> list[int]:
        """The findable blocks that hold the longest prefix of `tokens`, at most `most` of them. Takes nothing.

        `chain` caches the digests of the blocks of `tokens`; missing ones are appended as far as the search gets.
        """
        width = self.block_tokens * TOKEN_BYTES
        by_digest, keys = self._indexes.get(group, {}), self._keys
        found: list[int] = []
        parent = root
        for idx in range(most):
            key = parent + tokens[idx * width : (idx + 1) * width]
            if idx == len(chain):
                chain.append(xxh3_128_digest(key, self._hash_seed))
            parent = chain[idx]
            block = by_digest.get(parent)
            if block is None or keys[block] != key:
                break
            found.append(block)
        return found

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
        """Makes blocks first .. last - 1 of a table findable; `tokens` are the table's from its start, up to `last`.

        `blocks` may lack the `missing` first blocks of the table.

        Only for blocks whose content is computed by plans that are already issued. A block whose content another one
        already offers stays private. Returns the blocks that became findable.
        """
        width = self.block_tokens * TOKEN_BYTES
        by_digest = self._indexes.setdefault(group, {}) if group else self._by_digest
        keys, digests, homes, seed = self._keys, self._digests, self._homes, self._hash_seed
        parent = chain[first - 1] if first else root
        part = bytes(tokens[first * width : last * width])
        published: list[int] = []
        known = len(chain)
        for idx in range(first, last):
            start = (idx - first) * width
            key = parent + part[start : start + width]
            if idx < known:
                parent = chain[idx]
            else:
                parent = xxh3_128_digest(key, seed)
                chain.append(parent)
            block = blocks[idx - missing]
            if parent not in by_digest and keys[block] is None:
                by_digest[parent] = block
                keys[block] = key
                digests[block] = parent
                if group:
                    homes[block] = by_digest
                published.append(block)
        return published

    def publish_one(self, block: int, key: bytes) -> bytes:
        """`publish` for the next block of a chain: `key` is parent digest + token bytes. Returns its digest."""
        digest: bytes = xxh3_128_digest(key, self._hash_seed)
        if digest not in self._by_digest and self._keys[block] is None:
            self._by_digest[digest] = block
            self._keys[block] = key
            self._digests[block] = digest
        return digest

    def withdraw(self, blocks: Iterable[int]) -> None:
        """These blocks' content cannot be trusted: nobody finds them any more. Users keep them."""
        for block in blocks:
            if self._keys[block] is not None:
                self._unlist(block)
                if self._references[block] == 0:
                    del self._idle[block]
                    self._free.append(block)

    def forget(self) -> None:
        """No block's content exists any more, used or not."""
        self.withdraw(range(self.num_blocks))

    def fragmentation(self, unused_tokens: int) -> float:
        """Reserved but unused KV tokens / reserved KV tokens; 0 with nothing reserved."""
        reserved = self.used_blocks * self.block_tokens
        return unused_tokens / reserved if reserved else 0.0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts all invariants, given the block tables of all users."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._references, "reference counts differ from the block tables"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, "a block is free and idle"
        unused = {block for block, count in enumerate(expected) if count == 0}
        assert free | idle == unused, "free and idle blocks differ from the unreferenced ones"
        findable = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert idle == findable.keys() & unused, "idle blocks differ from the findable unreferenced ones"
        assert sum(map(len, self._indexes.values())) == len(findable), "the indexes differ from the findable blocks"
        for block in range(self.num_blocks):
            home = self._homes[block]
            assert home is None or block in findable, f"block {block} is in an index and cannot be found"
            assert block not in findable or (home or self._by_digest).get(self._digests[block]) == block, (
                f"block {block} is not found by its digest"
            )
        for block, key in findable.items():
            assert xxh3_128_digest(key, self._hash_seed) == self._digests[block], f"digest of block {block} is wrong"

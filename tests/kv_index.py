"""A router's view of a prefix cache, made from KV events only, and what the scheduler itself finds."""

from collections.abc import Sequence

from common.columns import pack_i32
from services.scheduler.fleet import Fleet
from services.scheduler.kv_events import Cleared, KvEvent, Removed, Stored

Index = dict[tuple[int, bytes], bytes]  # by group and digest: parent or root, and the block's tokens


class KvIndex:
    def __init__(self) -> None:
        self.blocks: Index = {}

    def take(self, events: Sequence[KvEvent], block_tokens: int) -> None:
        for event in events:
            match event:
                case Cleared():
                    self.blocks.clear()
                case Removed(group, digests):
                    for digest in digests:
                        del self.blocks[group, digest]
                case Stored(group, digests, parent, root, tokens):
                    assert len(tokens) == block_tokens * len(digests)
                    before = root if parent is None else parent
                    for place, digest in enumerate(digests):
                        part = tokens[place * block_tokens : (place + 1) * block_tokens]
                        assert (group, digest) not in self.blocks, "stored twice"
                        self.blocks[group, digest] = before + pack_i32(part)
                        before = digest

    def follow(self, fleet: Fleet) -> None:
        """Takes what has happened since, and asserts that it is what the fleet's pools offer."""
        log = fleet.book.kv_log
        assert log is not None
        self.take(log.drain(), log.block_tokens)
        assert self.blocks == offered(fleet)


def offered(fleet: Fleet) -> Index:
    """The prefix indexes of all worker groups, united."""
    found: Index = {}
    for core in fleet._groups.values():
        assert core.state.worker is not None
        for pool in core.state.worker.kv.pools:
            for group, index in pool._indexes.items():
                for digest, block in index.items():
                    key = pool._keys[block]
                    assert key is not None
                    found[group, digest] = key
    return found

"""Events of pools in a log; the simulator compares them with every index after every call."""

from common.columns import pack_i32
from common.protocol import KvGroup, ModelFacts
from services.scheduler.blocks import BlockPool, chain_root
from services.scheduler.kv_events import Cleared, KvLog, Removed, Stored, ToldPool, pools_of

ROOT = chain_root("", 1)
FACTS = ModelFacts("m", "a", 100, 64, (2,), 4, 8)


def pool(log: KvLog) -> ToldPool:
    (made,) = pools_of([8], FACTS, 1, log)
    assert isinstance(made, ToldPool)
    return made


def publish(blocks: BlockPool, ids: list[int], root: bytes = ROOT) -> tuple[list[int], list[bytes]]:
    chain: list[bytes] = []
    table = blocks.allocate(len(ids) // 4)
    blocks.publish(table, 0, len(table), bytearray(pack_i32(ids)), root, chain)
    return table, chain


def test_nothing_is_told_without_a_log() -> None:
    (plain,) = pools_of([8], FACTS, 1, None)
    assert type(plain) is BlockPool


def test_blocks_of_a_chain_are_one_event_with_their_parent() -> None:
    log = KvLog()
    blocks = pool(log)
    _, chain = publish(blocks, [*range(8)])
    assert log.drain() == [Stored(0, chain, None, ROOT, [*range(8)])] and log.drain() == []
    (next_one,) = blocks.allocate(1)
    digest = blocks.publish_one(next_one, chain[-1] + pack_i32([8, 9, 10, 11]))
    assert log.drain() == [Stored(0, [digest], chain[-1], b"", [8, 9, 10, 11])]
    first_alone = blocks.publish_one(blocks.allocate(1)[0], chain_root("salt", 1) + pack_i32([1, 2, 3, 4]))
    assert log.drain() == [Stored(0, [first_alone], None, chain_root("salt", 1), [1, 2, 3, 4])]
    log.check([blocks])


def test_what_another_block_offers_already_is_no_news() -> None:
    log = KvLog()
    blocks = pool(log)
    publish(blocks, [*range(4)])
    log.drain()
    publish(blocks, [*range(4)])
    blocks.publish_one(blocks.allocate(1)[0], ROOT + pack_i32(range(4)))
    assert log.drain() == []


def test_eviction_and_withdrawal_remove() -> None:
    log = KvLog()
    blocks = pool(log)
    kept, _ = publish(blocks, [*range(4)])
    table, chain = publish(blocks, [*range(50, 58)])
    log.drain()
    blocks.release(table)
    blocks.allocate(6)
    assert log.drain() == [Removed(0, [chain[1]])]
    blocks.withdraw([table[0]])
    assert log.drain() == [Removed(0, [chain[0]])]
    blocks.forget()
    assert log.drain() == [Cleared()]
    log.check([blocks])
    assert kept


def test_two_worker_groups_are_one_cache() -> None:
    log = KvLog()
    first, second = pool(log), pool(log)
    _, chain = publish(first, [*range(4)])
    publish(second, [*range(4)])
    assert [type(event) for event in log.drain()] == [Stored]
    first.forget()
    assert log.drain() == []
    second.forget()
    assert log.drain() == [Cleared()] and chain


def test_groups_of_layers_are_told_apart() -> None:
    log = KvLog()
    facts = ModelFacts("m", "a", 100, 64, (2,), 4, 8, groups=(KvGroup("full"), KvGroup("window", window=8)))
    (blocks,) = pools_of([8], facts, 1, log)
    table, chain = publish(blocks, [*range(4)])
    other = blocks.allocate(1)
    blocks.publish(other, 0, 1, bytearray(pack_i32(range(4))), ROOT, chain, group=1)
    assert [(event.group, event.digests) for event in log.drain() if isinstance(event, Stored)] == [
        (0, chain),
        (1, chain),
    ]
    blocks.withdraw(other)
    assert log.drain() == [Removed(1, chain)] and table

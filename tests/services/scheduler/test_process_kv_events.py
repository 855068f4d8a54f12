"""What subscribers of other projects read on the sockets, as frames and msgpack."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from common.columns import pack_i32
from common.config import Kv
from common.errors import ConfigError
from common.protocol import KvGroup, ModelFacts
from services.scheduler.blocks import chain_root
from services.scheduler.kv_events import KvLog, ToldPool, pools_of
from services.scheduler.process_kv_events import END, Publisher, endpoint_of, name
from tests.ports import free_port

ROOT = chain_root("", 1)
PLAIN = ModelFacts("m", "a", 100, 64, (2,), 4, 512)
LIMIT_MS = 240_000
Index = dict[tuple[int, int], tuple[int | None, list[int]]]  # by group and hash: parent, tokens


class Router:
    """A subscriber that follows one scheduler as vLLM's own example does: numbers, gaps, replay."""

    def __init__(self, endpoint: str, replay: str, topic: bytes = b"") -> None:
        context = zmq.Context.instance()
        self.sub: Any = context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.ask: Any = context.socket(zmq.DEALER)  # a REQ reads one answer only; its frames are the same
        self.ask.connect(replay)
        self.next = 0
        self.index: Index = {}
        self.replayed = 0

    def take(self) -> None:
        assert self.sub.poll(LIMIT_MS)
        _, number, payload = self.sub.recv_multipart()
        if int.from_bytes(number, "big") > self.next:
            self.catch_up()
        if int.from_bytes(number, "big") == self.next:
            self.apply(payload)

    def catch_up(self) -> None:
        for number, payload in self.asked(self.next):
            assert number == self.next, "the replay has a hole"
            self.apply(payload)
            self.replayed += 1

    def asked(self, first: int) -> list[tuple[int, bytes]]:
        self.ask.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.ask.poll(LIMIT_MS)
            empty, number, payload = self.ask.recv_multipart()
            assert empty == b""
            if number == END:
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def apply(self, payload: bytes) -> None:
        _at_s, events, _rank = msgspec.msgpack.decode(payload)
        self.next += 1
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.index.clear()
            elif kind == "BlockRemoved":
                hashes, medium, *group = fields
                assert medium == "GPU"
                for each in hashes:
                    del self.index[group[0] if group else 0, each]
            else:
                hashes, parent, tokens, size, lora_id, medium, _lora, _extra, *group = fields
                assert (kind, medium, lora_id, len(tokens)) == ("BlockStored", "GPU", None, size * len(hashes))
                for place, each in enumerate(hashes):
                    self.index[group[0] if group else 0, each] = (parent, tokens[place * size : (place + 1) * size])
                    parent = each

    def close(self) -> None:
        self.sub.close(0)
        self.ask.close(0)


def expected(pool: ToldPool) -> Index:
    found: Index = {}
    for group, digest in pool.offered():
        key = pool._keys[pool._indexes[group][digest]]
        assert key is not None
        parent = None if len(key) > 32 else name(key[:16])
        found[group, name(digest)] = parent, memoryview(key[-16:]).cast("i").tolist()
    return found


class Stage:
    def __init__(self, tmp_path: Path, facts: ModelFacts = PLAIN, **more: Any) -> None:
        self.endpoint, self.replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        kv = Kv(events_endpoint=self.endpoint, events_replay_endpoint=self.replay, **more)
        self.log = KvLog()
        (made,) = pools_of([facts.num_blocks], facts, 1, self.log)
        assert isinstance(made, ToldPool)
        self.pool = made
        self.publisher = Publisher(kv, 0, self.log, ROOT)
        self.routers: list[Router] = []

    def router(self, topic: bytes = b"") -> Router:
        self.routers.append(Router(self.endpoint, self.replay, topic))
        return self.routers[-1]

    def store(self, ids: list[int], root: bytes = ROOT) -> None:
        table = self.pool.allocate(len(ids) // 4)
        self.pool.publish(table, 0, len(table), bytearray(pack_i32(ids)), root, [])
        self.pool.release(table)
        self.publisher.publish()

    def close(self) -> None:
        for router in self.routers:
            router.close()
        self.publisher.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def joined(stage: Stage) -> Router:
    """A subscriber that surely hears: it has got a batch."""
    router = stage.router()
    count = 0
    while not router.sub.poll(20):
        stage.store([count, 90, 91, 92])
        count += 1
        assert count < 1000
    router.take()
    return router


def test_a_subscriber_rebuilds_the_index_from_events_and_replay(stage: Stage) -> None:
    stage.store([*range(12)])  # before it is there: only a replay tells
    router = joined(stage)
    assert router.replayed >= 2  # the clearing at the start, and that
    for start in range(0, 400, 4):
        stage.store([start % 97, start % 89, start % 83, 5, start % 7, 1, 2, 3])
    stage.store([50, 51, 52, 53], chain_root("salt", 1))
    while router.next < stage.publisher._next:
        router.take()
    assert router.index == expected(stage.pool) and len(router.index) > 100
    stage.pool.forget()
    stage.publisher.publish()
    router.take()
    assert router.index == {}


def test_a_gap_is_filled_by_a_replay(stage: Stage) -> None:
    router = joined(stage)
    while router.sub.poll(50):
        router.take()
    for number in range(5):
        stage.store([number, 60, 61, 62])
    for _ in range(3):
        assert router.sub.poll(LIMIT_MS)
        router.sub.recv_multipart()  # lost
    before = router.replayed
    while router.next < stage.publisher._next:
        router.take()
    assert router.replayed > before and router.index == expected(stage.pool)


def test_the_buffer_is_bounded_and_whoever_does_not_read_stops_nobody(tmp_path: Path) -> None:
    stage = Stage(tmp_path, events_buffer=10)
    deaf = stage.router()  # never reads
    for number in range(2000):
        stage.store([number % 97, number % 89, 1, 2])
    assert len(stage.publisher._buffer) == 10
    assert [number for number, _ in stage.publisher._buffer] == list(range(1991, 2001))
    assert [number for number, _ in deaf.asked(0)] == list(range(1991, 2001))
    stage.close()


def test_nonsense_asked_of_the_replay_is_ignored(stage: Stage) -> None:
    context = zmq.Context.instance()
    for frames in ([b""], [b"", b"short"], [b"", b"x" * 9], [b"a"] * 6):
        stranger: Any = context.socket(zmq.DEALER)
        stranger.connect(stage.replay)
        stranger.send_multipart(frames)
        stranger.close(100)
    stage.store([1, 2, 3, 4])
    router = joined(stage)
    assert router.index == expected(stage.pool)


def test_topic_rank_groups_and_salts(tmp_path: Path) -> None:
    facts = ModelFacts("m", "a", 100, 64, (2,), 4, 64, groups=(KvGroup("full"), KvGroup("window", window=8)))
    stage = Stage(tmp_path, facts, events_topic="kv@pod@m")
    stage.store([1, 2, 3, 4, 5, 6, 7, 8], chain_root("salt", 1))
    table = stage.pool.allocate(1)
    stage.pool.publish(table, 0, 1, bytearray(pack_i32([1, 2, 3, 4])), ROOT, [], group=1)
    stage.publisher.publish()
    (_, cleared), (_, salted), (_, window) = stage.publisher._buffer
    assert msgspec.msgpack.decode(cleared)[1:] == [[["AllBlocksCleared"]], 0]
    ((kind, hashes, parent, *_, extra, group, spec, width),) = msgspec.msgpack.decode(salted)[1]
    assert (kind, len(hashes), parent, group, spec, width) == ("BlockStored", 2, None, 0, "full_attention", None)
    assert extra == [[chain_root("salt", 1).hex()], None]
    ((*_, extra, group, spec, width),) = msgspec.msgpack.decode(window)[1]
    assert (extra, group, spec, width) == (None, 1, "sliding_window", 8)
    router = stage.router(b"kv@pod")
    other = stage.router(b"kv@other")
    count = 0
    while not router.sub.poll(20):
        stage.store([count, 1, 2, 3])
        count += 1
        assert count < 1000
    assert router.sub.recv_multipart()[0] == b"kv@pod@m" and not other.sub.poll(0)
    stage.close()


def test_each_scheduler_has_an_address_of_its_own() -> None:
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557" and endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("ipc:///run/kv", 1) == "ipc:///run/kv-1" and endpoint_of("", 3) == ""


def test_an_address_that_cannot_be_had_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    port = free_port()
    first = Publisher(Kv(events_endpoint=f"tcp://127.0.0.1:{port}"), 0, KvLog(), ROOT)
    with pytest.raises(ConfigError, match=r"kv\.events_endpoint: cannot bind"):
        Publisher(Kv(events_endpoint=f"tcp://127.0.0.1:{port}"), 0, KvLog(), ROOT)
    with pytest.raises(ConfigError, match=r"kv\.events_endpoint"):
        Publisher(Kv(events_endpoint="tcp://127.0.0.1:port"), 1, KvLog(), ROOT)
    first.close()

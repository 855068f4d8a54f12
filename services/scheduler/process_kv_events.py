"""Publishes KV events as vLLM does: a PUB socket, and a ROUTER socket that repeats what a subscriber has missed.

A batch is three frames: topic, number (8 bytes, big-endian, from 0 for each process start), and msgpack of [time,
events, rank]. Called by the scheduler's shell after its plans are sent. Nothing waits: a subscriber that does not read
loses batches, sees a gap in the numbers and asks for what it lacks. Owns both sockets and the bounded buffer; replays
are answered by a thread of their own, which only reads that buffer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from common.config import Kv
from common.errors import ConfigError
from common.transport import is_loopback
from services.scheduler.kv_events import KINDS, Cleared, KvEvent, KvLog, Removed, Stored

log = logging.getLogger("kv_events")
MEDIUM = "GPU"  # where a worker's cache is, whatever its device: what subscribers know
END = (-1).to_bytes(8, "big", signed=True)  # number of the frame behind the last one of a replay
MOST_BUFFERED_BYTES = 64 << 20
QUEUED = 100_000  # batches per subscriber; vLLM's number
SEND_MS = 1000  # a client of the replay may leave its queue full so long
LOOK_MS = 200  # between two looks whether the process ends


class Batch(msgspec.Struct, array_like=True):
    at_s: float  # Unix time
    events: list["BlockStored | GroupBlockStored | BlockRemoved | GroupBlockRemoved | AllBlocksCleared"]
    rank: int


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None
    extra_keys: list[list[str] | None] | None = None


class GroupBlockStored(BlockStored, tag="BlockStored"):
    """For a model whose layers keep unlike things."""

    group_idx: int = 0
    kv_cache_spec_kind: str = KINDS["full"]
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM


class GroupBlockRemoved(BlockRemoved, tag="BlockRemoved"):
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


def name(digest: bytes) -> int:
    """64 bits of a digest: what subscribers take for a block's hash."""
    return int.from_bytes(digest[:8], "big")


def wire_event(event: KvEvent, kv: KvLog, plain_root: bytes) -> WireEvent:
    """`plain_root`: what chains of requests without a cache salt start from."""
    several = len(kv.groups) > 1
    match event:
        case Stored(group, digests, parent, root, tokens):
            hashes, extra = [name(digest) for digest in digests], None
            if root and root != plain_root:  # nobody else may find these tokens
                extra = [[root.hex()], *[None] * (len(digests) - 1)]
            before = None if parent is None else name(parent)
            common = hashes, before, tokens, kv.block_tokens, None, MEDIUM, None, extra
            if not several:
                return BlockStored(*common)
            kind = kv.groups[group]
            return GroupBlockStored(*common, group, KINDS[kind.kind], kind.window or None)
        case Removed(group, digests):
            hashes = [name(digest) for digest in digests]
            return GroupBlockRemoved(hashes, MEDIUM, group) if several else BlockRemoved(hashes)
        case Cleared():
            return AllBlocksCleared()


def endpoint_of(endpoint: str, instance: int) -> str:
    """That of a scheduler: the configured one's port and its instance, as vLLM counts its ranks."""
    if not instance or not endpoint:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{instance}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + instance}" if port.isdecimal() else endpoint


class Publisher:
    """Raises ConfigError if it cannot bind."""

    def __init__(self, settings: Kv, instance: int, kv: KvLog, plain_root: bytes) -> None:
        self._rank, self._kv, self._plain_root = instance, kv, plain_root
        self._topic = settings.events_topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes, self._most = 0, settings.events_buffer
        self._lock = threading.Lock()  # of the buffer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = self._bound(zmq.PUB, settings.events_endpoint, "kv.events_endpoint", QUEUED)
        self._replay: threading.Thread | None = None
        self._ends = threading.Event()
        if settings.events_replay_endpoint:
            router = self._bound(zmq.ROUTER, settings.events_replay_endpoint, "kv.events_replay_endpoint", 1000)
            self._replay = threading.Thread(target=self._serve, args=(router,), name="kv-replay", daemon=True)
            self._replay.start()
        self._send([AllBlocksCleared()])  # whatever a predecessor has told

    def _bound(self, kind: int, configured: str, key: str, queue: int) -> "zmq.Socket[bytes]":
        endpoint = endpoint_of(configured, self._rank)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{key}: cannot bind {endpoint}: {error}") from error
        if endpoint.startswith("tcp://") and not is_loopback(endpoint):
            log.warning("%s: whoever reaches %s can read the tokens of all prompts and answers", key, endpoint)
        return socket

    def publish(self) -> None:
        """What has happened since the last call, if anything."""
        if events := self._kv.drain():
            self._send([wire_event(event, self._kv, self._plain_root) for event in events])

    def _send(self, events: Sequence[WireEvent]) -> None:
        payload = self._encoder.encode(Batch(time.time(), list(events), self._rank))
        number, self._next = self._next, self._next + 1
        with self._lock:
            self._buffer.append((number, payload))
            self._buffered_bytes += len(payload)
            while len(self._buffer) > self._most or self._buffered_bytes > MOST_BUFFERED_BYTES:
                self._buffered_bytes -= len(self._buffer.popleft()[1])
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        """The thread of the replays, until `close`."""
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a queue that is full, or a client that has gone, is an error
        router.setsockopt(zmq.SNDTIMEO, SEND_MS)
        while not self._ends.is_set():
            if router.poll(LOOK_MS):
                frames = router.recv_multipart()
                if len(frames) >= 2 and len(frames[-1]) == 8:  # a REQ puts an empty frame between, others may not
                    self._repeat(router, frames[:-1], int.from_bytes(frames[-1], "big"))
        router.close()

    def _repeat(self, router: "zmq.Socket[bytes]", client: list[bytes], first: int) -> None:
        """Everything from `first` on that is kept; a client that does not read gets no end, so it knows."""
        with self._lock:
            kept = [each for each in self._buffer if each[0] >= first]
        try:
            for number, payload in kept:
                router.send_multipart((*client, number.to_bytes(8, "big"), payload))
            router.send_multipart((*client, END, b""))
        except zmq.ZMQError as error:
            log.warning("a replay of KV events ended early: %s", error)

    def close(self) -> None:
        self._ends.set()
        if self._replay:
            self._replay.join()
        self._socket.close()

"""ZeroMQ links: one inbox (PULL, bound) per process, one Push (PUSH, connected) per peer it writes to.

A frame is a 12-byte header (magic, protocol version, sender incarnation) and one msgpack message. Sends never block:
a full link refuses, and the caller decides. Frames that cannot be read, of another version, or of a departed sender
are counted and dropped, never raised. A socket belongs to the one thread or loop that made it. On tcp, with the keys
that `secure` took, each inbox is a CURVE server and each Push a CURVE client, so that both ends know each other.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from common import curve
from common.config import Config, Links
from common.curve import AllowList, KeyPair, LinkKeys
from common.errors import ConfigError
from common.protocol import PROTOCOL_VERSION
from common.transport_zap import DOMAIN, Gatekeeper

log = logging.getLogger("links")
MAGIC = b"VL"
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
HEADER = struct.Struct("<2sHQ")
DRAIN_LIMIT = 1024  # frames handled before the loop gets a turn
POLLIN = int(zmq.POLLIN)  # the library's flag costs as much as the question
LOOKS = 3  # frames of a drain before each of which the socket is asked whether there is one
MAX_FRAME_BYTES = 256 * 1024 * 1024
HANDSHAKE_MS = 10_000  # a tcp peer that has not proved who it is by then is cut
MOST_PORT = 65535
T = TypeVar("T")


class LinkCounters(msgspec.Struct):
    """Cumulative counts of one process's links."""

    received: int = 0
    sent: int = 0
    bad_frame: int = 0  # not ours, truncated, or not a message of this receiver
    bad_version: int = 0
    dead_sender: int = 0
    refused: int = 0  # sends that found the link full


def new_incarnation() -> int:
    """A random non-zero id for one process start."""
    return int.from_bytes(os.urandom(8), "little") >> 1 | 1


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine reaches a tcp endpoint; of names only localhost counts."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def scheduler_endpoint(config: Config, instance: int = 0) -> str:
    """The well-known address of a scheduler. Raises ConfigError for a port that does not exist."""
    if config.links.transport == "tcp":
        port = config.links.scheduler_port + instance
        if port > MOST_PORT:
            raise ConfigError(f"links.scheduler_port leaves no port for scheduler {instance}; choose a smaller one")
        return f"tcp://{config.links.host}:{port}"
    return f"ipc://{config.run_dir}/scheduler{f'-{instance}' if instance else ''}"


class Security:
    """What guards this process's tcp links. Written by `secure` only, before the first link."""

    def __init__(self) -> None:
        self.keys: LinkKeys | None = None
        self.open = False  # the operator wants tcp without keys beyond this host
        self.gatekeeper: Gatekeeper | None = None  # one per process, as ZeroMQ has it


SECURITY = Security()


def secure(links: Links) -> None:
    """Takes the keys of this process's tcp links. Raises ConfigError if they cannot be used, or are needed."""
    SECURITY.keys, SECURITY.open = None, False
    if links.transport != "tcp":
        return
    if links.keys_dir:
        keys = curve.read(Path(links.keys_dir))
        for name, pair in ((curve.SERVER, keys.server), (curve.CLIENT, keys.client)):
            if not _fits(pair):
                raise ConfigError(f"links.keys_dir: the two keys in {keys.folder / name} do not belong together")
        clients = AllowList(keys.folder)
        if clients.find(keys.client.public_bytes) is None:
            raise ConfigError(
                f"links.keys_dir: {curve.CLIENT} of {keys.folder} is not among the allowed clients, so that the "
                "processes of this host could not connect to each other; see `valence keys links show`"
            )
        if SECURITY.gatekeeper is None:
            SECURITY.gatekeeper = Gatekeeper(zmq.Context.instance(), clients)
            SECURITY.gatekeeper.start()
        SECURITY.gatekeeper.clients = clients
        SECURITY.keys = keys
    elif links.insecure_tcp:
        SECURITY.open = True
        log.warning("links.insecure_tcp: whoever reaches %s can read prompts and run this server", links.host)
    elif not is_loopback(f"tcp://{links.host}:0"):
        raise ConfigError(
            f"links.host {links.host} is reached from other hosts: tcp links need keys. Make them with "
            "`valence keys links init DIR` and set links.keys_dir, or, on a network where every host is trusted, set "
            "links.insecure_tcp = true"
        )


def _fits(pair: KeyPair) -> bool:
    return zmq.curve_public(z85.encode(pair.secret_bytes)) == z85.encode(pair.public_bytes)


def _permitted(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return endpoint.startswith("ipc://")
    return bool(SECURITY.keys) or SECURITY.open or is_loopback(endpoint)


class Push:
    """The sending end of a link to one peer."""

    def __init__(self, endpoint: str, incarnation: int, queue: int, counters: LinkCounters) -> None:
        self.endpoint = endpoint
        self._counters = counters
        self._encoder = msgspec.msgpack.Encoder()
        self._header = HEADER.pack(MAGIC, PROTOCOL_VERSION, incarnation)
        self._frame = bytearray(self._header)
        self._queue = queue
        self._socket = self._open()

    def _open(self) -> "zmq.Socket[bytes] | None":
        """None while this process has no descriptors left: who may join or ask must not be able to end it."""
        try:
            opened: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        except zmq.ZMQError as error:
            if error.errno in NO_DESCRIPTORS:
                return None
            raise
        opened.set(zmq.SNDHWM, self._queue)
        opened.set(zmq.LINGER, 0)
        opened.set(zmq.RECONNECT_IVL, 20)
        opened.set(zmq.RECONNECT_IVL_MAX, 500)
        self._connect(opened)
        return opened

    def _connect(self, socket: "zmq.Socket[bytes]") -> None:
        """An address that is none, or must not be used, is told; its link then refuses all sends: peers name them."""
        if not _permitted(self.endpoint):
            log.error("no link to %.200r: it leads beyond this host, and there are no keys", self.endpoint)
            return
        if self.endpoint.startswith("tcp://") and (keys := SECURITY.keys):
            socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            socket.set(zmq.CURVE_SERVERKEY, keys.server.public_bytes)
            socket.set(zmq.CURVE_PUBLICKEY, keys.client.public_bytes)
            socket.set(zmq.CURVE_SECRETKEY, keys.client.secret_bytes)
        try:
            socket.connect(self.endpoint)
        except (zmq.ZMQError, ValueError, UnicodeError) as error:
            log.error("no link to %.200r: %s", self.endpoint, error)

    def send(self, message: msgspec.Struct) -> bool:
        """Queues the message; False if the link is full, or not open yet (`refused` is counted)."""
        self._socket = self._socket or self._open()
        if self._socket is None:
            self._counters.refused += 1
            return False
        frame = self._frame
        self._encoder.encode_into(message, frame, HEADER.size)
        try:
            # Copying is cheaper than zero-copy bookkeeping for frames of a few kilobytes.
            self._socket.send(frame, zmq.DONTWAIT, copy=True)
        except zmq.Again:
            self._counters.refused += 1
            return False
        self._counters.sent += 1
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Drops what is not sent after `linger_ms`."""
        if self._socket is not None:
            self._socket.close(linger=linger_ms)


class Inbox(Generic[T]):
    """The receiving end: messages of one union from any number of peers, blocking form."""

    def __init__(self, endpoint: str, union: Any, queue: int, counters: LinkCounters) -> None:
        self.counters = counters
        self.departed: Collection[int] = frozenset()  # incarnations whose frames are dropped; set by the owner
        self._decode: Callable[[Any], T] = msgspec.msgpack.Decoder(union).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, queue)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.endpoint = self._bind(endpoint)

    def _bind(self, endpoint: str) -> str:
        if not _permitted(endpoint):
            self._socket.close()
            raise ConfigError(f"refusing to bind {endpoint}: tcp links beyond this host need keys (links.keys_dir)")
        if endpoint.startswith("tcp://"):
            self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            if keys := SECURITY.keys:
                self._socket.set(zmq.ZAP_DOMAIN, DOMAIN)
                self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
                self._socket.set(zmq.CURVE_SERVER, 1)
                self._socket.set(zmq.CURVE_SECRETKEY, keys.server.secret_bytes)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            if error.errno == zmq.EADDRINUSE:
                raise  # a predecessor that is not quite gone: the next start finds the port free
            raise ConfigError(f"cannot bind {endpoint}: {error.strerror or error}") from error
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def drain(self, limit: int = DRAIN_LIMIT) -> list[tuple[int, T]]:
        """All (sender, message) pairs that have arrived, at most `limit` frames, without waiting."""
        batch: list[tuple[int, T]] = []
        socket, receive = self._socket, self._socket.recv
        for taken in range(limit):
            # To look costs a third of the exception that a try in vain raises; where much has come, tries are cheaper.
            if taken < LOOKS and not socket.get(zmq.EVENTS) & POLLIN:  # type: ignore[operator]
                break
            try:
                frame = receive(zmq.DONTWAIT)
            except zmq.Again:
                break
            received = self._open(frame)
            if received is not None:
                batch.append(received)
        return batch

    def wait(self, timeout_s: float) -> bool:
        """True when a frame can be read, False after the time-out."""
        return bool(self._socket.poll(int(timeout_s * 1000), zmq.POLLIN))

    def _open(self, frame: bytes) -> tuple[int, T] | None:
        counters = self.counters
        counters.received += 1
        if len(frame) <= HEADER.size or frame[:2] != MAGIC:
            counters.bad_frame += 1
            return None
        _, version, sender = HEADER.unpack_from(frame)
        if version != PROTOCOL_VERSION:
            counters.bad_version += 1
            return None
        if sender in self.departed:
            counters.dead_sender += 1
            return None
        try:
            return sender, self._decode(memoryview(frame)[HEADER.size :])
        except (msgspec.DecodeError, ValueError, RecursionError, UnicodeDecodeError):
            counters.bad_frame += 1
            return None

    def close(self) -> None:
        self._socket.close(linger=0)
        if self.endpoint.startswith("ipc://"):
            # libzmq leaves the file when the context is not terminated.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.endpoint.removeprefix("ipc://"))


class AsyncInbox(Inbox[T]):
    """The same on an event loop: each wake-up hands everything that has arrived to one synchronous handler.

    A callback on ZeroMQ's descriptor costs a third of a task switch per message through `zmq.asyncio`.
    The descriptor is edge-triggered: it must be drained to empty before waiting again, which `_readable` ensures.
    """

    def start(self, handler: Callable[[list[tuple[int, T]]], None]) -> None:
        """Calls `handler` with each non-empty batch, from the running loop, until `close`."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._readable)
        self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._socket.closed:
            return
        batch = self.drain()
        if batch:
            # The next turn looks again: frames may arrive, and move the edge, while the handler runs.
            self._loop.call_soon(self._readable)
            self._handler(batch)

    def close(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.remove_reader(self._descriptor)
        super().close()

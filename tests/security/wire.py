"""What an attacker at the TCP level has: raw connections, ZeroMQ's framing, a relay that records and repeats."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

GREETING = b"\xff" + (1).to_bytes(8, "big") + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def connect(endpoint: str) -> socket.socket:
    return socket.create_connection(address(endpoint), timeout=120)


def until_closed(sock: socket.socket) -> bytes:
    """What still comes until the other side closes; fails after the socket's time-out."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            received += part
    return received


def frames(stream: bytes) -> Iterator[bytes]:
    """The whole frames of a ZMTP 3 stream behind its greeting, each with its header."""
    at = len(GREETING)
    while at + 2 <= len(stream):
        if stream[at] & 2:
            if at + 9 > len(stream):
                return
            size = 9 + struct.unpack_from(">Q", stream, at + 1)[0]
        else:
            size = 2 + stream[at + 1]
        if at + size > len(stream):
            return
        yield stream[at : at + size]
        at += size


class Relay:
    """Passes one connection at a time on to `endpoint`; keeps what the client sent, and can say a frame again."""

    def __init__(self, endpoint: str) -> None:
        self._target = address(endpoint)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = bytearray()
        self._out: socket.socket | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inward, _ = self._listener.accept()
                outward = socket.create_connection(self._target)
                with self._lock:
                    self._out = outward
                    self.recorded.clear()
                for source, sink, kept in ((inward, outward, self.recorded), (outward, inward, None)):
                    self._start(self._pass, source, sink, kept)

    def _pass(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if kept is not None:
                    with self._lock:
                        kept.extend(part)
                sink.sendall(part)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def messages(self) -> list[bytes]:
        """Encrypted messages of the client so far."""
        with self._lock:
            return [frame for frame in frames(bytes(self.recorded)) if b"\x07MESSAGE" in frame[:17]]

    def repeat(self, frame: bytes) -> None:
        assert self._out is not None
        self._out.sendall(frame)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

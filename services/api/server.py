"""uvicorn with three things of ours: it leaves signals alone, it bounds how much and how slowly a client may send
before it has asked for something, and a response may be written without a task switch.

ASGI's `send` costs a task switch and a dictionary per event; `Wire` writes straight to the connection and says when
the peer takes no more or has gone (docs/adr/0003-http-framework.md has the figures). The application finds the wire
in `scope["extensions"]["valence.wire"]`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from common.config import Api
from services.api import errors

WIRE = "valence.wire"
KEEP_ALIVE_S = 65  # longer than the idle time of common clients and proxies, so that they close first
BACKLOG = 2048
CHUNK_OVERHEAD = 8  # bytes around a byte of a chunked body; chunks of one byte have 5
TOO_LONG = "the request line and the headers are too long"


class Settings(uvicorn.Config):
    """uvicorn's, and our limits: uvicorn has none for the head of a request, nor for the time that one takes."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        super().__init__(
            app,
            http=Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        self.api = api


class Part(Enum):
    """Which part of a request is awaited."""

    BEGIN = 0
    HEAD = 1
    BODY = 2


class Refused(Exception):
    """Ends the parsing; the answer is in the protocol's `_refusal`."""


class Protocol(HttpToolsProtocol):
    """One connection. Its wire belongs to the request being answered.

    One timer bounds what the client may dribble: the first byte and the head of a request, and a body that nobody
    reads because the answer is complete. A body that is read is bounded by its reader.
    """

    config: Settings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wires: list[Wire] = []  # of requests being answered; several when a client pipelines
        self._part = Part.BEGIN
        self._head_bytes = self._header_bytes = self._body_bytes = self._payload_bytes = 0
        self._refusal = (400, "")
        self._timer: asyncio.TimerHandle | None = None
        self._arm(self.config.api.max_header_s)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        before = self._part
        super().data_received(data)
        if self.transport.is_closing():
            return
        limits, now = self.config.api, self._part
        if now is Part.BODY:
            if before is Part.BODY:
                self._body_bytes += len(data)
                overhead = self._body_bytes - self._payload_bytes  # sizes and extensions of chunks, trailers
                too_much = overhead > limits.max_header_bytes + CHUNK_OVERHEAD * self._payload_bytes
                if too_much or (not self._answering and self._body_bytes > limits.max_body_bytes):
                    self.transport.close()
            return
        if now is Part.HEAD and before is not Part.BODY:
            self._head_bytes += len(data)
            if self._head_bytes > limits.max_header_bytes:
                self._refuse(431, TOO_LONG)
                return
        if self._timer is None and (now is Part.HEAD or not self._answering):
            self._arm(limits.max_header_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part, self._head_bytes, self._header_bytes = Part.HEAD, 0, 0
        wire = Wire(self)
        self._wires = [busy for busy in self._wires if busy.busy] + [wire]
        extensions: dict[str, Any] = {WIRE: wire}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is Part.HEAD:  # trailers are no headers
            self._header_bytes += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + self._header_bytes > self.config.api.max_header_bytes:
            self._refusal = 431, TOO_LONG
            raise Refused
        self._disarm()
        self._part, self._body_bytes, self._payload_bytes = Part.BODY, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._payload_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = Part.BEGIN
        self._wires[-1].whole = True
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._part is Part.BODY and not self._answering:
            self._arm(self.config.api.max_body_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        for wire in self._wires:
            wire.notify_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        wires, self._wires = self._wires, []
        for wire in wires:
            wire.notify_lost()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets OpenAI's error body, too."""
        status, message = self._refusal
        self._refuse(status, message or msg)

    def _refuse(self, status: int, message: str) -> None:
        """An answer from here, unless it would end up within another one; then no more from this connection."""
        if not self._answering:
            body = errors.encode(errors.problem(status, message))
            head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n" % (STATUS_LINE[status], len(body))
            self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _arm(self, wait_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(wait_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """The client is too slow, or does not want anything."""
        self._timer = None
        if self._answering:
            self.cycle.keep_alive = False  # an earlier request of this connection goes on
        elif self._part is Part.HEAD:
            self._refuse(408, f"the head of the request took longer than {self.config.api.max_header_s:g} s")
        else:
            self.transport.close()


class Wire:
    """The writing side of one response, and its two events. Used from the event loop only."""

    __slots__ = ("_flow", "_transport", "on_lost", "on_writable", "whole")

    def __init__(self, protocol: Protocol) -> None:
        self.whole = False  # the request's body is here
        self._flow: FlowControl = protocol.flow
        self._transport = protocol.transport
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Somebody waits for an event of this wire."""
        return self.on_writable is not None or self.on_lost is not None

    @property
    def writable(self) -> bool:
        return not self._flow.write_paused

    def write_chunk(self, body: bytes) -> bool:
        """One chunk of a response whose start announced chunked encoding. Whether the client takes more."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self._flow.write_paused

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the client goes away. Call it after the body was read: a large one pauses reading."""
        self.on_lost = on_lost
        self._flow.resume_reading()
        if self._transport.is_closing():
            on_lost()

    def abort(self) -> None:
        """Closes at once; what is not sent is lost."""
        self._transport.abort()

    def notify_writable(self) -> None:
        if self.on_writable is not None:
            self.on_writable()

    def notify_lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()


def wire_of(scope: Scope) -> Wire:
    wire: Wire = scope["extensions"][WIRE]
    return wire


class Server(uvicorn.Server):
    """Runs on the process's own loop, on sockets that are given."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        super().__init__(Settings(app, api))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the lifecycle's."""
        yield

    def stop_listening(self) -> None:
        """Open connections go on; the kernel hands new ones to others that share the port."""
        for server in self.servers:
            server.close()

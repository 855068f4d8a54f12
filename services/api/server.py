"""uvicorn with two things of ours: it leaves signals alone, and a response may be written without a task switch.

ASGI's `send` costs a task switch and a dictionary per event; `Wire` writes straight to the connection and says when
the peer takes no more or has gone (docs/adr/0003-http-framework.md has the figures). The application finds the wire
in `scope["extensions"]["valence.wire"]`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.api import errors

WIRE = "valence.wire"
KEEP_ALIVE_S = 65  # longer than the idle time of common clients and proxies, so that they close first
BACKLOG = 2048


class Protocol(HttpToolsProtocol):
    """One connection. Its wire belongs to the request being answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wires: list[Wire] = []  # of requests being answered; several when a client pipelines

    def on_message_begin(self) -> None:
        super().on_message_begin()
        wire = Wire(self)
        self._wires = [busy for busy in self._wires if busy.busy] + [wire]
        extensions: dict[str, Any] = {WIRE: wire}
        self.scope["extensions"] = extensions

    def resume_writing(self) -> None:
        super().resume_writing()
        for wire in self._wires:
            wire.notify_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        wires, self._wires = self._wires, []
        for wire in wires:
            wire.notify_lost()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets OpenAI's error body, too."""
        body = errors.encode(errors.problem(400, msg))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class Wire:
    """The writing side of one response, and its two events. Used from the event loop only."""

    __slots__ = ("_flow", "_transport", "on_lost", "on_writable")

    def __init__(self, protocol: Protocol) -> None:
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

    def write_chunk(self, body: bytes) -> None:
        """One chunk of a response whose start announced chunked encoding."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

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

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
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
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the lifecycle's."""
        yield

    def stop_listening(self) -> None:
        """Open connections go on; the kernel hands new ones to others that share the port."""
        for server in self.servers:
            server.close()

"""A cheap HTTP load generator: many concurrent streams in one process, at a few microseconds per received chunk.

It shares the cores with the services it measures, so it does no more than find the end and the usage of each stream.
"""

import asyncio
import functools
import json
import time
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import uvloop

END = b"data: [DONE]"


class StreamResult(msgspec.Struct):
    """One stream. Times are seconds since its request was sent."""

    prompt_tokens: int
    output_tokens: int
    first_s: float
    total_s: float
    num_events: int


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.request = request
        self.done: asyncio.Future[StreamResult] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._first_s = 0.0
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._start_s = time.perf_counter()
        cast(asyncio.Transport, transport).write(self.request)  # uvloop's transports are no subclasses of it

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        if events and not self._first_s:
            self._first_s = time.perf_counter() - self._start_s
        self._events += events
        self._tail = (self._tail + data)[-2048:]

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if END not in self._tail:
            self.done.set_exception(RuntimeError(f"stream ended early: {self._tail[-300:]!r}"))
            return
        at = self._tail.rindex(b'"usage":{') + len(b'"usage":')
        usage = json.JSONDecoder().raw_decode(self._tail[at:].decode())[0]
        total_s = time.perf_counter() - self._start_s
        result = StreamResult(usage["prompt_tokens"], usage["completion_tokens"], self._first_s, total_s, self._events)
        self.done.set_result(result)


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: valence\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def _run(port: int, path: str, bodies: Iterable[dict[str, Any]]) -> list[StreamResult]:
    loop = asyncio.get_running_loop()
    streams = []
    for body in bodies:
        full = {**body, "stream": True, "stream_options": {"include_usage": True}}
        make_stream = functools.partial(_Stream, _request(path, full))
        _, stream = await loop.create_connection(make_stream, "127.0.0.1", port)
        streams.append(stream)
    return list(await asyncio.gather(*(stream.done for stream in streams)))


def stream_all(port: int, path: str, bodies: Iterable[dict[str, Any]]) -> list[StreamResult]:
    """Opens one stream per body at once and waits for all. Raises RuntimeError if one ends without [DONE]."""
    return uvloop.run(_run(port, path, bodies))

"""A cheap HTTP load generator: many concurrent streams in one process, at a few microseconds per received chunk.

It shares the cores with the services it measures, so it does no more than find the end and the usage of each stream
and note when text came.
"""

import asyncio
import functools
import json
import time
from array import array
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import uvloop

END = b"data: [DONE]"
EVENT, TEXT = b"data: ", b'"finish_reason":null'
OVERLAP = len(TEXT) - 1  # bytes of the last chunk that a marker may have begun in


class StreamResult(msgspec.Struct):
    """One stream. Times are seconds since it was opened, at `opened_s` of this machine's monotonic clock."""

    prompt_tokens: int
    output_tokens: int
    first_s: float
    total_s: float
    num_events: int
    opened_s: float = 0.0
    text_s: bytes = b""  # doubles: when each event with text came
    error: str = ""  # the server ended it without [DONE], or could not be reached

    def text_times(self) -> "array[float]":
        times = array("d")
        times.frombytes(self.text_s)
        return times


class Stream(asyncio.Protocol):
    """One request on a connection of its own. `done` never raises."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.done: asyncio.Future[StreamResult] = asyncio.get_running_loop().create_future()
        self._opened_s = time.perf_counter()
        self._tail = b""
        self._first_s = 0.0
        self._events = 0
        self._text_s = array("d")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.request)  # uvloop's transports are no subclasses of it

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter() - self._opened_s
        end = self._tail[-OVERLAP:] if self._tail else b""
        # A marker that lies in the last chunk alone has been counted with it.
        seen = end + data
        events = seen.count(EVENT) - end.count(EVENT)
        if events and not self._first_s:
            self._first_s = now_s
        self._events += events
        for _ in range(seen.count(TEXT)):
            self._text_s.append(now_s)
        self._tail = data if len(data) >= 2048 else (self._tail + data)[-2048:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self._result())

    def _result(self) -> StreamResult:
        total_s = time.perf_counter() - self._opened_s
        times = (self._first_s, total_s, self._events, self._opened_s, self._text_s.tobytes())
        if END not in self._tail:
            text = self._tail[-300:].decode(errors="replace")
            return StreamResult(0, 0, *times, error=f"stream ended early: {text}")
        at = self._tail.rindex(b'"usage":{') + len(b'"usage":')
        usage = json.JSONDecoder().raw_decode(self._tail[at:].decode(errors="replace"))[0]
        return StreamResult(usage["prompt_tokens"], usage["completion_tokens"], *times)


def encode_request(path: str, body: dict[str, Any], api_key: str = "") -> bytes:
    """The bytes of one streaming request. The server closes the connection after its answer."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: valence\r\nConnection: close\r\nContent-Type: application/json\r\n"
    if api_key:
        head += f"Authorization: Bearer {api_key}\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def run_stream(host: str, port: int, request: bytes) -> StreamResult:
    """Opens one stream and waits for its end; the result's `error` tells whatever went wrong."""
    opened_s = time.perf_counter()
    try:
        _, stream = await asyncio.get_running_loop().create_connection(functools.partial(Stream, request), host, port)
    except OSError as error:
        return StreamResult(0, 0, 0.0, time.perf_counter() - opened_s, 0, opened_s, error=str(error))
    return await stream.done


async def _run(port: int, path: str, bodies: Iterable[dict[str, Any]]) -> list[StreamResult]:
    loop = asyncio.get_running_loop()
    streams = []
    for body in bodies:
        make_stream = functools.partial(Stream, encode_request(path, body))
        _, stream = await loop.create_connection(make_stream, "127.0.0.1", port)
        streams.append(stream)
    return list(await asyncio.gather(*(stream.done for stream in streams)))


def stream_all(port: int, path: str, bodies: Iterable[dict[str, Any]]) -> list[StreamResult]:
    """Opens one stream per body at once and waits for all. Raises RuntimeError if one ends without [DONE]."""
    results = uvloop.run(_run(port, path, bodies))
    for result in results:
        if result.error:
            raise RuntimeError(result.error)
    return results

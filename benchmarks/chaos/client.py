"""One request, streamed or not, written down as it came: every event with its time, and how it ended.

`run` never raises for what a server or a network may do. It finds out which process serves the connection before it
sends anything: the replicas of an API share one port, and whether a broken stream was to be expected depends on it.
"""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from benchmarks.chaos.asks import Ask

SILENCE_S = 120.0  # without a byte, until a stream counts as hung: a comment comes every 15 s
WHOLE_S = 1200.0  # the same for an answer that is not streamed: no byte comes before all of it
Owner = Callable[[int], int]  # local port of a connection -> pid of the API process that has accepted it, 0: none (yet)


class Outcome(msgspec.Struct):
    """`end`: "ended" with [DONE]; "error" event; "broken" connection; "refused" with a status, before a stream began;
    "unreachable", nobody took the connection; "hung". Times are of the monotonic clock.
    """

    ask: int
    opened_s: float
    end: str = "broken"
    owner: int = 0
    status: int = 0
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    arrivals: list[float] = []  # of events that carry something
    ended_s: float = 0.0
    breach: str = ""  # of the protocol: news after an end, a second [DONE]
    detail: str = ""


class Broken(Exception):
    """The server closed the connection too early."""


async def run(
    host: str, port: int, ask: Ask, owner: Owner, between: Callable[[Outcome], Awaitable[None]] | None = None
) -> Outcome:
    """`between` is awaited after each piece that was read: a slow client, or one that leaves by an exception."""
    outcome = Outcome(ask.number, time.monotonic(), texts={}, reasons={}, arrivals=[])
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        outcome.end, outcome.detail = "unreachable", str(error)
        outcome.ended_s = time.monotonic()
        return outcome
    try:
        outcome.owner = await _accepted(reader, writer, owner)
        content = json.dumps(ask.body).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nHost: valence\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        async with asyncio.timeout(None) as patience:
            await _read(reader, outcome, patience, bool(ask.body.get("stream")), between)
    except TimeoutError:
        outcome.end = "hung"
    except (Broken, OSError, asyncio.IncompleteReadError) as error:
        if outcome.end != "error":  # which is followed by no [DONE]
            outcome.end, outcome.detail = "broken", str(error)
    finally:
        outcome.ended_s = time.monotonic()
        writer.close()
    return outcome


async def _accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: Owner) -> int:
    """Pid of the process that serves the connection; 0 if it was closed before anybody took it."""
    port = writer.get_extra_info("sockname")[1]
    end_s = time.monotonic() + SILENCE_S
    while time.monotonic() < end_s:
        if pid := owner(port):
            return pid
        await asyncio.sleep(0.02)
        sock: socket.socket = writer.get_extra_info("socket")
        if writer.is_closing() or reader.at_eof() or sock.fileno() < 0:
            break
    return 0


async def _read(
    reader: asyncio.StreamReader,
    outcome: Outcome,
    patience: asyncio.Timeout,
    streamed: bool,
    between: Callable[[Outcome], Awaitable[None]] | None,
) -> None:
    patience_s = SILENCE_S if streamed else WHOLE_S
    patience.reschedule(asyncio.get_running_loop().time() + patience_s)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    outcome.status = int(head.split(" ", 2)[1])
    if outcome.status != 200:
        outcome.end, outcome.detail = "refused", (await reader.read()).decode(errors="replace")[:300]
        return
    if "transfer-encoding: chunked" not in head.lower():
        take_whole(outcome, await reader.read(), time.monotonic())
        return
    rest = b""
    while size := int(await reader.readline() or _early(), 16):
        body = await reader.readexactly(size + 2)
        now_s = time.monotonic()
        *events, rest = (rest + body[:-2]).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                take(outcome, event[6:], now_s)
        patience.reschedule(asyncio.get_running_loop().time() + patience_s)
        if between is not None:
            await between(outcome)
    if outcome.end != "ended" and outcome.end != "error":
        raise Broken("the answer is complete, and has no [DONE]")


def _early() -> bytes:
    raise Broken("closed in the middle of the answer")


def take_whole(outcome: Outcome, body: bytes, now_s: float) -> None:
    """The answer of a request that is not streamed. Raises Broken if it is cut."""
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise Broken("closed in the middle of the answer") from error
    usage = answer["usage"]
    outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in answer["choices"]:
        index = choice["index"]
        outcome.texts[index] = choice["message"]["content"] if "message" in choice else choice["text"]
        outcome.reasons[index] = choice["finish_reason"]
    outcome.arrivals.append(now_s)
    outcome.end = "ended"


def take(outcome: Outcome, event: bytes, now_s: float) -> None:
    """One event's content into the outcome."""
    if event == b"[DONE]":
        if outcome.end == "ended":
            outcome.breach = "[DONE] came twice"
        outcome.end = "ended"
        return
    if outcome.end in ("ended", "error"):
        outcome.breach = f"an event after the end: {event[:200]!r}"
    news: dict[str, Any] = json.loads(event)
    if "error" in news:
        outcome.end, outcome.detail = "error", json.dumps(news["error"])[:300]
        return
    if usage := news.get("usage"):
        outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in news["choices"]:
        index = choice["index"]
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        if index in outcome.reasons:
            outcome.breach = f"choice {index} has news after its end"
        if text or choice["finish_reason"]:
            outcome.arrivals.append(now_s)
        outcome.texts[index] = outcome.texts.get(index, "") + text
        if choice["finish_reason"]:
            outcome.reasons[index] = choice["finish_reason"]

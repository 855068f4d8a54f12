"""Bytes over raw sockets to the real HTTP listener and application, before tokenizers that answer at once.

Whatever comes: each answer is HTTP with a right status and, unless it is 2xx, OpenAI's error body; afterwards no
request is open, no connection is left, memory is what it was, and the next client is served.
"""

import asyncio
import contextlib
import gc
import json
import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import psutil

from tests.fuzz import mutate
from tests.services.api.system import CHAT, COMPLETION, System, running

LIMIT_S = 240
AT_ONCE = 8
GROWTH_BYTES = 64 << 20
STATUSES = {200, 400, 404, 405, 408, 411, 413, 415, 417, 431}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
SETTINGS = ("api.max_header_s=0.5", "api.max_body_s=0.5", "api.max_body_bytes=100000")
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/tiny",
    "/health",
    "/version",
    "/openapi.json",
    "/metrics",
    "/nothing",
    "*",
    "//",
    "/%00%ff",
    "/v1/models/%ed%a0%80",
    "/v1/completions?a=b#c",
    "http://elsewhere/v1/models",
)
BODIES: tuple[Any, ...] = (
    COMPLETION,
    CHAT,
    COMPLETION | {"stream": True, "max_tokens": 5},
    CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    {"model": "tiny", "prompt": "text", "messages": None},
    {"model": "tiny", "tokens": [1, 2, 3]},
)
ODD_BODIES = (
    b"",
    b"null",
    b"{",
    b"[]",
    b'"text"',
    b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode(),
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "\xc3\x28"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800", "model": "\\ud800"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": "x", "prompt": [1], "prompt": "y"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": -1e-999}',
    b'{"prompt": "x", "temperature": 1e-320}',
    b'{"prompt": "x", "seed": 99999999999999999999999999999999}',
    b'{"prompt": "x", "n": 1e2}',
    b'{"prompt": "x", "logit_bias": {"1e3": 1, "-1": 2, "\\u0661": 3, " 4": 1}}',
    b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    b'{"prompt": "x", "user": ' + b'{"a":' * 20000 + b"1" + b"}" * 20000 + b"}",
    b'{"prompt": "x", "metadata": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    b'{"prompt": "x", "' + b"k" * 50000 + b'": 1}',
    b'{"prompt": "x"' + b', "a": 1' * 9000 + b"}",
    b'{"prompt": "x"} {"prompt": "y"}',
    b'{"prompt": "x"}' + b" " * 90000,
    b"{" * 99000,
    b"x" * 200000,
)
HEADERS = (
    "Content-Type: application/json",
    "Content-Type: text/plain",
    "Content-Type: multipart/form-data; boundary=x",
    "Content-Type: application/json; charset=utf-16",
    "Content-Encoding: gzip",
    "Connection: close",
    "Connection: keep-alive",
    "Connection: upgrade",
    "Upgrade: websocket",
    "Expect: 100-continue",
    "Expect: something",
    "X-Request-Id: " + "x" * 500,
    "X-Request-Id: \0",
    "X-Request-Timeout-Ms: 9999999999999999999",
    "X-Request-Timeout-Ms: -1",
    "X-Request-Timeout-Ms: \u0661",
    "Authorization: Bearer x",
    "X: " + "y" * 40000,
    "X:\ty",
    "X : y",
    ": y",
    "\tfolded",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: gzip, chunked",
    "Content-Length: 5, 5",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Content-Length: +5",
    "Content-Length: \u0665",
    "Host: ",
    "Host: a\r\nHost: b",
    "Accept: \xff",
    "\n",
)


def request(random: Random) -> bytes:
    """One request: mostly of the right form, with odd parts."""
    method = random.choice(("POST", "POST", "POST", "POST", "GET", "HEAD", "OPTIONS", "PUT", "PRI", "post", "TRACE"))
    version = random.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", ""))
    path = random.choice(PATHS)
    if random.random() < 0.4:
        method, path, version = "POST", random.choice(PATHS[:4]), "HTTP/1.1"
    lines = [f"{method} {path} {version}", "Host: x"]
    lines += random.sample(HEADERS, random.choice((0, 0, 0, 0, 0, 1, 2)))
    body = _body(random)
    chunked = random.random() < 0.3
    lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body) + _lie(random)}")
    head = "\r\n".join(lines).encode("latin-1", "ignore") + b"\r\n\r\n"
    return head + (_chunks(random, body) if chunked else body)


def _body(random: Random) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(ODD_BODIES)
    body = random.choice(BODIES)
    for _ in range(random.choice((0, 0, 1, 3))):
        body = mutate.tree(random, body)
    encoded = json.dumps(body, ensure_ascii=random.random() < 0.7).encode("utf-8", "surrogatepass")
    return mutate.frame(random, encoded) if kind == 1 else encoded


def _lie(random: Random) -> int:
    return random.choice((0,) * 12 + (1, -1, 1000))


def _chunks(random: Random, body: bytes) -> bytes:
    pieces = []
    size = random.choice((1, 7, 1000, 10**6))
    for begin in range(0, min(len(body), 5000 * size), size):
        piece = body[begin : begin + size]
        stated = random.choice(
            (f"{len(piece):x}",) * 200 + ("0", "-1", "fffffffffffffffff", "zz", f"{len(piece) + 1:X}")
        )
        extension = ";a=" + "b" * 3000 if random.random() < 0.02 else ""
        pieces.append(f"{stated}{extension}\r\n".encode() + piece + b"\r\n")
    return b"".join(pieces) + random.choice((b"0\r\n\r\n",) * 5 + (b"0\r\nX: y\r\n\r\n", b"", b"0\r\n"))


def talk(random: Random) -> list[bytes]:
    """What one connection sends, piece by piece; pipelined, cut off or with changed bytes."""
    sent = b"".join(request(random) for _ in range(random.choice((1, 1, 1, 2, 5))))
    if random.random() < 0.15:
        sent = mutate.frame(random, sent)
    if random.random() < 0.15:
        sent = sent[: random.randrange(len(sent) + 1)]
    if random.random() < 0.8:
        return [sent]
    cuts = sorted(random.randrange(len(sent) + 1) for _ in range(random.choice((1, 4, 30))))
    return [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]


async def converse(system: System, random: Random) -> Counter[int]:
    """One connection, to its end; the answers by status. Raises AssertionError if one is not what it should be."""
    pieces = talk(random)
    ending = random.choice(("wait", "wait", "half", "half", "half", "cut"))
    reader, writer = await asyncio.open_connection(system.listener.host, system.listener.port, limit=1 << 26)
    answer = bytearray()
    try:
        with contextlib.suppress(OSError):  # the server may have closed
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if ending == "cut":
                writer.transport.abort()
                return Counter()
            if ending == "half":
                writer.write_eof()
        with contextlib.suppress(OSError):
            # "wait" ends by the server's own limits; an idle connection after good requests stays open for long.
            try:
                async with asyncio.timeout(LIMIT_S if ending == "half" else 1.5):
                    await _read(reader, answer)
            except TimeoutError:
                assert ending == "wait", "the server neither answers nor closes"
    finally:
        writer.close()
    try:
        return check(bytes(answer))
    except AssertionError as error:
        error.add_note(f"sent: {b''.join(pieces)[:3000]!r}\nanswer: {answer[:1000]!r}")
        raise


async def _read(reader: asyncio.StreamReader, answer: bytearray) -> None:
    while piece := await reader.read(1 << 16):
        answer += piece


def check(answer: bytes) -> Counter[int]:
    """Every answer in the bytes of a connection, by status; there may be none."""
    statuses: Counter[int] = Counter()
    assert not answer or STATUS.match(answer), "an answer that is no HTTP"
    for found in STATUS.finditer(answer):
        status = int(found[1])
        assert status in STATUSES or status == 100, f"status {status}"
        statuses[status] += 1
    for part in re.split(rb"(?=HTTP/1\.1 \d{3} )", answer)[1:]:
        status = int(part[9:12])
        head, _, body = part.partition(b"\r\n\r\n")
        if status >= 400 and body and b"chunked" not in head:
            error = json.loads(body)["error"]
            assert error["message"] and error["type"], error
    return statuses


async def bombard(budget: int, first: int, advance: Callable[[], None]) -> Counter[int]:
    random, statuses = Random(first), Counter[int]()
    async with running(*SETTINGS) as (system, client):
        process = psutil.Process()

        async def worker() -> None:
            while budget > worker_done[0]:
                worker_done[0] += 1
                statuses.update(await converse(system, Random(random.getrandbits(64))))
                advance()

        worker_done = [0]
        base = len(asyncio.all_tasks())
        for _ in range(20):
            await converse(system, Random(random.getrandbits(64)))
        gc.collect()
        before = process.memory_info().rss
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(worker())
        # Connections that the listener has cut, or whose clients have gone, are forgotten.
        await system.until(lambda: not system.gateway.hub.choices and not system.gateway.hub.calls)
        await system.until(lambda: len(asyncio.all_tasks()) <= base)
        await system.until(lambda: not any(c.status == "ESTABLISHED" for c in _accepted(process, system)))
        gc.collect()
        grown = process.memory_info().rss - before
        assert grown < GROWTH_BYTES, f"memory has grown by {grown} bytes"
        answer = await client.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 200, answer.text
    return statuses


def _accepted(process: psutil.Process, system: System) -> list[Any]:
    return [c for c in process.net_connections("tcp") if c.laddr and c.laddr.port == system.listener.port and c.raddr]


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` connections."""
    print(sorted(asyncio.run(bombard(budget, first, advance)).items()))

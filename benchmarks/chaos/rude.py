"""Clients that do not behave: bad bodies, no HTTP, uploads that stop in the middle. Each tells what it got in answer.

The right answer to bad input is a 4xx with an error body, or a closed connection where no HTTP was spoken.
"""

import asyncio
import json
import random

from benchmarks.chaos.asks import MODEL

ANSWER_S = 60.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAD: tuple[tuple[str, bytes], ...] = (
    (TEXT, b"{"),
    (TEXT, b"\xff\xfe\x00"),
    (TEXT, b"[" * 20_000),
    (TEXT, json.dumps({"model": MODEL}).encode()),
    (TEXT, json.dumps({"model": "another", "prompt": "hi"}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": -1}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": "hi", "temperature": 1e300}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": [1, "x"]}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": [10**9]}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": "word " * 20_000}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": "hi", "n": 10**6}).encode()),
    (CHAT, json.dumps({"model": MODEL, "messages": []}).encode()),
    (CHAT, json.dumps({"model": MODEL, "messages": [{"role": "no/role", "content": "x"}]}).encode()),
    (CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": 7}], "stream": True}).encode()),
    ("/v1/nothing", b"{}"),
)
NO_HTTP = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\0" * 4096)


async def bad_input(host: str, port: int, chance: random.Random) -> str:
    """Sends something wrong; what is wrong with the answer, or nothing. A lost connection is the caller's to judge:
    raises OSError.
    """
    path, body = chance.choice(BAD)
    head = f"POST {path} HTTP/1.1\r\nHost: valence\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await _exchange(host, port, head.encode() + body)
    if not answer:
        raise ConnectionResetError("no answer")
    status = int(answer.split(b" ", 2)[1])
    if 400 <= status < 500 or status == 503:
        return ""
    return f"{path} {body[:60]!r} was answered {status}"


async def no_http(host: str, port: int, chance: random.Random) -> str:
    """Bytes that are no HTTP: a 400, or a closed connection. Raises OSError if the connection is lost."""
    answer = await _exchange(host, port, chance.choice(NO_HTTP))
    if answer and int(answer.split(b" ", 2)[1]) != 400:
        return f"what is no HTTP was answered {answer[:80]!r}"
    return ""


async def aborted_upload(host: str, port: int, chance: random.Random) -> str:
    """Half a body, and gone. Raises OSError if nobody takes it."""
    _, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"POST %b HTTP/1.1\r\nHost: valence\r\nContent-Length: 1000000\r\n\r\n" % TEXT.encode())
        writer.write(b'{"prompt": "' + b"x" * chance.randrange(500_000))
        await asyncio.sleep(chance.uniform(0.0, 0.3))
    finally:
        writer.transport.abort()
    return ""


async def _exchange(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        async with asyncio.timeout(ANSWER_S):
            return await reader.read()
    finally:
        writer.close()

import asyncio
import json
import signal

import pytest

from tests.services.api.system import COMPLETION, System, running, scenario


async def exchange(system: System, request: bytes) -> bytes:
    """What the server answers until it closes, or stays silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
    writer.write(request)
    answer = b""
    while b"\r\n\r\n" not in answer or b"connection: close" in answer.lower():
        part = await asyncio.wait_for(reader.read(65536), 10)
        if not part:
            break
        answer += part
    writer.close()
    return answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"x" * 70_000,
    ],
)
def test_what_is_no_http_does_no_harm(request_bytes: bytes) -> None:
    async def main() -> None:
        async with running() as (system, client):
            _, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            writer.write(request_bytes)
            await writer.drain()
            writer.close()
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


def test_a_broken_request_line_gets_openais_body() -> None:
    async def main() -> None:
        async with running() as (system, _):
            answer = await exchange(system, b"NOT HTTP AT ALL\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["type"] == "invalid_request_error"

    scenario(main)


def test_pipelined_requests_are_answered_in_order_and_lost_together() -> None:
    async def main() -> None:
        async with running() as (system, _):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            content = json.dumps(COMPLETION).encode()
            one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
            reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            writer.write(one + one)
            await system.until(lambda: len(tokenizer.submits) == 1)
            tokenizer.answer(tokenizer.submits[0])
            assert b'"text":" t0 t1' in await reader.readuntil(b"system_fingerprint")
            await system.until(lambda: len(tokenizer.submits) == 2)
            writer.close()
            await system.until(lambda: tokenizer.aborts == [tokenizer.submits[1].seq_id])

    scenario(main)


def test_signals_stay_with_the_lifecycle() -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        async with running():
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    scenario(main)

import asyncio
import contextlib
import json
import signal

import pytest

from tests.services.api.system import COMPLETION, LIMIT_S, System, running, scenario


async def exchange(system: System, request: bytes) -> bytes:
    """What the server answers until it closes, or stays silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
    writer.write(request)
    answer = b""
    while b"\r\n\r\n" not in answer or b"connection: close" in answer.lower():
        part = await asyncio.wait_for(reader.read(65536), LIMIT_S)
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


CLOSED = (ConnectionError, RuntimeError)  # what a write to a closed connection raises, the latter uvloop's


async def dribble(system: System, head: bytes, drops: bytes, every_s: float = 0.02) -> bytes:
    """Sends `head`, then one byte of `drops` at a time, again and again, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
    writer.write(head)

    async def drip() -> None:
        with contextlib.suppress(*CLOSED):
            while drops:
                for drop in drops:
                    writer.write(bytes([drop]))
                    await asyncio.sleep(every_s)

    dripping = asyncio.create_task(drip())
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), LIMIT_S):
            answer += part
    dripping.cancel()
    writer.close()
    return answer


def content_of(answer: bytes, status: int) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head.lower(), answer
    error: dict[str, str] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize(
    ("head", "drops", "answered"),
    [
        (b"", b"", False),  # says nothing
        (b"", b"\r\n", False),  # what the parser skips before a request
        (b"", b"GET /" + b"a" * 100, True),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nx: ", b"a", True),
        (b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /", b"a", True),  # the second one
        (b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n", False),  # after an answer
    ],
)
def test_a_head_that_does_not_come_ends_the_connection(head: bytes, drops: bytes, answered: bool) -> None:
    async def main() -> None:
        async with running("api.max_header_s=0.8") as (system, client):
            answer = await dribble(system, head, drops)
            first = b"HTTP/1.1 200" in answer
            assert first is (b"live" in head)
            rest = answer[answer.rindex(b"HTTP/1.1 ") :] if b"HTTP/1.1 " in answer else b""
            if answered:
                assert content_of(rest, 408)["message"].startswith("the head of the request took longer than 0.8 s")
            else:
                assert not rest or first
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)


def test_a_slow_head_behind_a_running_request_does_not_cut_it() -> None:
    async def main() -> None:
        async with running("api.max_header_s=0.4") as (system, _):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            content = json.dumps(COMPLETION).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
            writer.write(head + content + b"GET /slow")
            await system.until(lambda: len(tokenizer.submits) == 1)
            await asyncio.sleep(0.6)
            tokenizer.answer(tokenizer.submits[0])
            answer = await asyncio.wait_for(reader.read(), LIMIT_S)  # and the connection ends after it
            assert answer.startswith(b"HTTP/1.1 200 ") and b" t0 t1 t2" in answer and answer.count(b"HTTP/1.1") == 1
            writer.close()

    scenario(main)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nlong: " + b"a" * 2000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"h: v\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nunended: " + b"a" * 2000,
    ],
    ids=range(4),
)
@pytest.mark.parametrize("pieces", [1, 8])
def test_a_long_head_is_refused(head: bytes, pieces: int) -> None:
    async def main() -> None:
        async with running("api.max_header_bytes=1000") as (system, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            size = -(-len(head) // pieces)
            with contextlib.suppress(*CLOSED):
                for at in range(0, len(head), size):
                    writer.write(head[at : at + size])
                    await writer.drain()
                    await asyncio.sleep(0.005)
            answer = b""
            with contextlib.suppress(ConnectionError):  # what was not read any more may cost the answer
                answer = await asyncio.wait_for(reader.read(), LIMIT_S)
            if pieces == 1 or answer:
                assert content_of(answer, 431)["type"] == "invalid_request_error"
            writer.close()
            for _ in range(2):
                response = await client.get("/health/live", headers={"padding": "a" * 700})
                assert response.status_code == 200

    scenario(main)


def test_a_body_that_does_not_come_is_answered_408() -> None:
    async def main() -> None:
        async with running("api.max_body_s=0.6") as (system, client):
            for framing, drops in ((b"Content-Length: 1000", b" "), (b"Transfer-Encoding: chunked", b"1\r\n \r\n")):
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % framing
                answer = await dribble(system, head, drops)
                assert content_of(answer, 408)["code"] == "request_timeout"
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


def test_a_body_that_nobody_reads_is_not_waited_for() -> None:
    async def main() -> None:
        async with running("api.max_body_s=0.6") as (system, _):
            answer = await dribble(system, b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b" ")
            assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"HTTP/1.1") == 1

    scenario(main)


async def pour(writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count // 1000):
        writer.write(b"a" * 1000)
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/nothing", "/v1/completions"])
def test_endless_trailers_and_unread_bodies_end_the_connection(path: str) -> None:
    async def main() -> None:
        async with running("api.max_header_bytes=1000", "api.max_body_bytes=100000") as (system, client):
            _, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
            await system.until(lambda: bool(system.gateway.figures.edge.http) or path != "/nothing")
            writer.write(b"0\r\ntrailer: ")
            with pytest.raises(CLOSED):
                await pour(writer, 10_000_000)
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)


def test_trailers_are_no_headers() -> None:
    async def main() -> None:
        async with running() as (system, _):
            content = json.dumps(COMPLETION).encode()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            body = b"%x\r\n%b\r\n0\r\nx-request-timeout-ms: nonsense\r\n\r\n" % (len(content), content)
            assert (await dribble(system, head + body, b"")).startswith(b"HTTP/1.1 200 ")

    scenario(main)


def test_a_connection_that_has_asked_is_kept_longer_than_a_head_may_take() -> None:
    async def main() -> None:
        async with running("api.max_header_s=0.6") as (system, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            for _ in range(2):
                writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await asyncio.wait_for(reader.readuntil(b"}"), LIMIT_S)
                await asyncio.sleep(0.8)
            assert not reader.at_eof()
            writer.close()

    scenario(main)

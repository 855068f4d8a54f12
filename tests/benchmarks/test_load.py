import asyncio
import json

import pytest

from benchmarks.load import StreamResult, encode_request, run_stream

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"index":0,"text":"ab","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'


def answered(*writes: bytes) -> tuple[StreamResult, bytes]:
    """What a stream makes of an answer in these pieces, and the request that it sent."""

    async def main() -> tuple[StreamResult, bytes]:
        asked: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in writes:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        result = await run_stream("127.0.0.1", port, encode_request("/v1/completions", {"prompt": [1]}))
        server.close()
        await server.wait_closed()
        return result, asked[0]

    return asyncio.run(main())


def test_a_stream_is_timed_and_counted() -> None:
    result, request = answered(HEAD + TEXT, TEXT, USAGE + b"data: [DONE]\n\n")
    assert (result.prompt_tokens, result.output_tokens, result.num_events, result.error) == (3, 2, 4, "")
    first, second = result.text_times()
    assert 0 < first <= second <= result.total_s and first == result.first_s
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize("cut", [1, 5, 20, len(TEXT) - 3])
def test_a_cut_inside_an_event_counts_it_once(cut: int) -> None:
    result, _ = answered(HEAD, TEXT[:cut], TEXT[cut:] + TEXT, USAGE, b"data: [DONE]\n\n")
    assert (result.num_events, len(result.text_times())) == (4, 2)


def test_what_goes_wrong_is_told() -> None:
    result, _ = answered(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":"full"}')
    assert "ended early" in result.error and "full" in result.error
    refused = asyncio.run(run_stream("127.0.0.1", 1, b""))
    assert refused.error and refused.output_tokens == 0


def test_a_request_asks_for_a_stream_with_usage() -> None:
    head, _, content = encode_request("/v1/completions", {"prompt": [1, 2]}).partition(b"\r\n\r\n")
    body = json.loads(content)
    assert body == {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}
    assert f"Content-Length: {len(content)}".encode() in head

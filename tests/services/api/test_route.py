import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from services.api import route
from tests.services.api.system import COMPLETION, running, scenario

SETTING = "api.max_body_bytes=1000"


def test_every_endpoint_module_is_found_once() -> None:
    found = [(endpoint.method, endpoint.path) for endpoint in route.discover()]
    assert len(found) == len(set(found))
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/openapi.json")} <= set(found)


def test_a_body_up_to_the_limit_is_read() -> None:
    async def main() -> None:
        async with running(SETTING) as (_, client):
            body = json.dumps({**COMPLETION, "user": ""}).encode()
            padded = body[:-2] + b"x" * (1000 - len(body)) + body[-2:]
            assert len(padded) == 1000
            assert (await client.post("/v1/completions", content=padded)).status_code == 200
            assert (await client.post("/v1/completions", content=padded + b" ")).status_code == 413

    scenario(main)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 500
        await asyncio.sleep(0)


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 500


@pytest.mark.parametrize("count", [3, 40])
def test_a_chunked_body_is_cut_at_the_limit(count: int) -> None:
    async def main() -> None:
        async with running(SETTING) as (_, client):
            response = await client.post("/tokenize", content=chunks(count))
            assert response.status_code == 413 and response.headers["connection"] == "close"
            assert response.json()["error"]["code"] == "request_too_large"
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)


def test_a_body_without_end_is_not_read_for_ever() -> None:
    async def main() -> None:
        async with running(SETTING) as (_, client):
            try:
                response = await client.post("/tokenize", content=endless())
                assert response.status_code == 413
            except httpx.TransportError:
                pass  # the server closed while the client was writing
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)


def test_ten_megabytes_are_refused_by_their_announcement() -> None:
    async def main() -> None:
        async with running() as (_, client):
            response = await client.post("/v1/completions", content=b"x" * (10 << 20))
            assert response.status_code == 413 and "10485760 bytes" in response.text

    scenario(main)


def test_a_client_that_leaves_while_it_sends_does_no_harm() -> None:
    async def main() -> None:
        async with running() as (system, client):
            _, writer = await asyncio.open_connection("127.0.0.1", system.listener.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()
            await system.until(lambda: sum(system.gateway.figures.edge.http.values()) == 1)
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)

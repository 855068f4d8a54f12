import asyncio
import json

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Reject, RejectReason
from services.api import route
from services.api.app import Direct
from services.api.gateway import Gateway
from services.api.route import Endpoint
from tests.services.api.system import COMPLETION, running, scenario


def error_of(response: httpx.Response) -> dict[str, str | None]:
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str | None] = response.json()["error"]
    if response.request.url.path.startswith("/v1/messages"):
        assert set(error) == {"type", "message"} and response.json()["request_id"] == response.headers["x-request-id"]
        return {"param": None, "code": None} | error
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_every_answer_that_is_not_ok_has_openais_body() -> None:
    async def main() -> None:
        async with running() as (_, client):
            assert error_of(await client.get("/nothing"))["code"] == "not_found"
            assert error_of(await client.get("/v1/models/"))["code"] in ("not_found", "model_not_found")
            for path, method, allow in (
                ("/v1/completions", "GET", "POST"),
                ("/v1/completions", "OPTIONS", "POST"),
                ("/health", "POST", "GET, HEAD"),
                ("/v1/models", "DELETE", "GET, HEAD"),
            ):
                response = await client.request(method, path)
                assert response.status_code == 405
                assert sorted(response.headers["allow"].split(", ")) == sorted(allow.split(", "))
                assert error_of(response)["code"] == "method_not_allowed"
            bad = await client.post("/v1/completions", json={**COMPLETION, "temperature": 9})
            assert bad.status_code == 400 and error_of(bad)["param"] == "temperature"
            missing = await client.post("/v1/completions", json={**COMPLETION, "model": "x"})
            assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"
            assert (await client.head("/health/live")).status_code == 200

    scenario(main)


def test_the_content_type_does_not_matter() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                content = json.dumps(COMPLETION).encode()
                response = await client.post("/v1/completions", content=content, headers={"content-type": kind})
                assert response.status_code == 200

    scenario(main)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"prompt":"\\ud800"}', b"null", b"NaN"])
def test_bodies_that_are_no_request(body: bytes) -> None:
    async def main() -> None:
        async with running() as (_, client):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await client.post(path, content=body)
                assert response.status_code == 400
                assert error_of(response)["type"] == "invalid_request_error"
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


def test_request_ids_are_taken_checked_and_echoed() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for given in ("abc-1.2:3_x", "x" * 128):
                response = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": given})
                assert response.headers["x-request-id"] == given and response.json()["id"] == f"cmpl-{given}"
            for given in ("", "with space", "x" * 129, 'quote"', "ü".encode("latin-1")):
                response = await client.get("/nothing", headers={"x-request-id": given})
                made = response.headers["x-request-id"]
                assert len(made) == 32 and int(made, 16) >= 0

    scenario(main)


def test_a_fault_is_a_500_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(gateway: Gateway, request: Request) -> Response:
        raise ZeroDivisionError

    endpoints = [*route.discover(), Endpoint("GET", "/broken", broken, "Fails")]
    monkeypatch.setattr("services.api.app.discover", lambda: endpoints)

    async def main() -> None:
        async with running() as (_, client):
            response = await client.get("/broken")
            assert response.status_code == 500 and error_of(response)["code"] is None
            assert "ZeroDivision" not in response.text
            assert (await client.get("/health/live")).status_code == 200

    scenario(main)


def test_fixed_paths_are_found_without_a_search_and_refused_like_others() -> None:
    seen: list[str] = []

    async def rest(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(f"searched {scope['method']} {scope['path']}")

    async def good(request: Request) -> ASGIApp:
        return Response(b"good")

    async def bad(request: Request) -> ASGIApp:
        raise Reject(RejectReason.INVALID, "bad")

    async def worse(request: Request) -> ASGIApp:
        raise HTTPException(413)

    async def refuse(request: Request, error: Exception) -> Response:
        return Response(b"refused", error.status_code if isinstance(error, HTTPException) else 400)

    async def send(message: Message) -> None:
        seen.append(str(message.get("status", message.get("body"))))

    async def receive() -> Message:
        raise AssertionError("nobody reads the body")

    direct = Direct(
        rest,
        {("POST", "/good"): good, ("POST", "/bad"): bad, ("POST", "/worse"): worse},
        {Reject: refuse, HTTPException: refuse},
    )

    async def ask(method: str, path: str) -> list[str]:
        seen.clear()
        await direct({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
        return list(seen)

    async def main() -> None:
        assert await ask("POST", "/good") == ["200", "b'good'"]
        assert await ask("POST", "/bad") == ["400", "b'refused'"]
        assert await ask("POST", "/worse") == ["413", "b'refused'"]
        assert await ask("GET", "/good") == ["searched GET /good"]
        assert await ask("POST", "/good/1") == ["searched POST /good/1"]

    asyncio.run(main())


def test_answers_are_counted_by_route() -> None:
    async def main() -> None:
        async with running() as (system, client):
            for path in ("/v1/models/tiny", "/v1/models/other", "/nothing", "/also/nothing"):
                await client.get(path)
            await client.request("PROPFIND", "/health")
            http = system.gateway.figures.edge.http
            assert http["/v1/models/{model:path}", "GET", 200] == http["/v1/models/{model:path}", "GET", 404] == 1
            assert http["other", "GET", 404] == 2 and http["/health", "other", 405] == 1

    scenario(main)


ORIGIN = {"origin": "https://page.example"}
PREFLIGHT = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_without_origins_there_is_no_cors() -> None:
    async def main() -> None:
        async with running() as (_, client):
            assert (await client.options("/v1/models", headers=PREFLIGHT)).status_code == 405
            response = await client.get("/v1/models", headers=ORIGIN)
            assert not any(name.startswith("access-control") for name in response.headers)

    scenario(main)


def test_pages_of_the_origins_that_are_set_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_API_KEYS", "ann=vl-1")

    async def main() -> None:
        async with running('api.cors_origins=["https://page.example"]') as (_, client):
            asked = await client.options("/v1/models", headers=PREFLIGHT)  # a browser sends it without the key
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == ORIGIN["origin"]
            assert "authorization" in asked.headers["access-control-allow-headers"]
            body = {**COMPLETION, "stream": True}
            for key, status in (("vl-1", 200), ("wrong", 401)):
                headers = {**ORIGIN, "authorization": f"Bearer {key}"}
                response = await client.post("/v1/completions", json=body, headers=headers)
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
            other = {**PREFLIGHT, "origin": "https://other.example"}
            assert "access-control-allow-origin" not in (await client.options("/v1/models", headers=other)).headers

    scenario(main)

"""What an endpoint is, and how its handler reads a body and answers.

Every module in `endpoints/` lists its `ENDPOINTS`; routes and the OpenAPI document are made from these lists.
"""

import asyncio
import contextlib
import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.config import Api
from services.api import endpoints, errors
from services.api.gateway import Gateway
from services.api.schema.parse import Body
from services.api.server import wire_of

METRICS_PATH = "/metrics"  # other servers have it at the main address, so ours may be there
DISCARD_BYTES, DISCARD_S = 16 << 20, 2.0


class Endpoint(NamedTuple):
    method: str
    path: str
    handle: Callable[[Gateway, Request], Awaitable[ASGIApp]]
    summary: str
    body: Body[Any] | None = None
    reply: Any = None  # a struct, or a list of them
    public: bool = False  # answers without an API key
    admin: bool = False  # not at the main address unless told; where keys are used, for some of them
    media_type: str = "application/json"  # of a good answer
    batched: bool = False  # serves the requests of batches, too
    form: bool = False  # takes a form with a file (upload.py)


def discover() -> list[Endpoint]:
    """The endpoints of all modules, in the modules' order by name."""
    found: list[Endpoint] = []
    for module in pkgutil.iter_modules(endpoints.__path__, endpoints.__name__ + "."):
        found += importlib.import_module(module.name).ENDPOINTS
    return found


def offered(endpoint: Endpoint, api: Api, admin: bool) -> bool:
    """Whether an endpoint is at the administrative or else the main address. Health is at both."""
    if endpoint.path == METRICS_PATH:
        return api.metrics in ("admin" if admin else "main", "both")
    return endpoint.public or endpoint.admin == admin or (endpoint.admin and api.admin_on_main)


def json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def request_id(request: Request) -> str:
    identity: str = request.scope["state"]["request_id"]
    return identity


async def read_body(request: Request, api: Api) -> bytes:
    """The whole body. Raises HTTPException 413 as soon as it is known to be too large, 408 if it takes too long, and
    Reject if this replica holds too many bytes of bodies already."""
    if wire_of(request.scope).whole:
        return await _read_body(request, api.max_body_bytes)
    try:
        async with asyncio.timeout(api.max_body_s):
            return await _read_body(request, api.max_body_bytes)
    except TimeoutError as error:
        message = f"the body took longer than {api.max_body_s:g} s"
        raise HTTPException(408, message, {"connection": "close"}) from error


async def _read_body(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise HTTPException(413, f"the body of {announced} bytes exceeds the limit of {limit}")
    body = bytearray()
    hold, more = request.scope["state"]["hold"], True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise errors.invalid("the client has gone")
        part = message.get("body", b"")
        hold.add(len(part))
        body += part
        more = message.get("more_body", False)
        if len(body) > limit:
            raise HTTPException(413, f"the body exceeds the limit of {limit} bytes")
    return bytes(body)


class TooLarge(Response):
    """A 413 that reaches clients which only read after writing: discards some of the rest before closing."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, 413, {"connection": "close"}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left, more = DISCARD_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and left > 0:
                    message = await receive()
                    more = message.get("more_body", False)
                    left -= len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""The ASGI application: routes from the endpoints' lists, errors as JSON, request ids and HTTP figures at the edge."""

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import env
from common.errors import Reject
from common.log import RequestLogger
from common.recorder import Kind
from services.api import errors
from services.api.bodies import Hold
from services.api.gateway import Gateway
from services.api.guard import Guard
from services.api.keys import Keyring
from services.api.route import Endpoint, TooLarge, discover, offered, request_id
from services.api.traces import Http

Handler = Callable[[Request], Awaitable[ASGIApp]]
Refusals = Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]

log = logging.getLogger("api")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


class Edge:
    """Around everything: gives each request an id and its answer the header, counts answers and their time."""

    def __init__(self, app: ASGIApp, gateway: Gateway, paths: list[str]) -> None:
        self._app = app
        self._figures, self._bodies = gateway.figures.edge, gateway.bodies
        self._tracer = gateway.tracer
        self._plain = {path for path in paths if "{" not in path}
        self._prefixes = [(path.split("{")[0], path) for path in paths if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_s = time.monotonic()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        identity = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        hold = Hold(self._bodies)
        begun = self._tracer.begin(scope["headers"]) if self._tracer else None
        state: dict[str, Any] = {"request_id": identity.decode(), "arrived_s": started_s, "hold": hold, "trace": begun}
        scope["state"] = state
        names = (b"x-request-id", b"request-id") if errors.of_anthropic(scope["path"]) else (b"x-request-id",)
        status = 499  # the client has gone before an answer

        async def send_identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((name, identity) for name in names)]
                if begun:
                    message["headers"] += begun.headers()
            await send(message)

        try:
            await self._app(scope, receive, send_identified)
        finally:
            hold.release()
            ended_s = time.monotonic()
            seconds = ended_s - started_s
            route, method = self._route(scope["path"]), scope["method"]
            self._figures.answered(route, method if method in METHODS else "other", status, seconds)
            if begun and self._tracer:
                http = Http(method, route, status, identity.decode(), started_s, ended_s)
                self._tracer.tell(begun, state.get("generation"), http)
            if log.isEnabledFor(logging.DEBUG):
                request_log = RequestLogger(log, identity.decode())
                request_log.debug("%s %s %d in %.0f ms", method, route, status, seconds * 1000)

    def _route(self, path: str) -> str:
        """The label of a path; unknown ones share one, so that clients cannot make labels."""
        if path in self._plain:
            return path
        return next((label for prefix, label in self._prefixes if path.startswith(prefix)), "other")


class Direct:
    """Finds what has a fixed path in a dictionary: a search through all routes and the layers around each cost more
    than most handlers do. `rest` has the other routes, and answers for unknown ones and for other methods."""

    def __init__(self, rest: ASGIApp, handlers: Mapping[tuple[str, str], Handler], refusals: Refusals) -> None:
        self._rest, self._handlers, self._refusals = rest, handlers, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._handlers.get((scope["method"], scope["path"]))
        if handle is None:
            await self._rest(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
            await response(scope, receive, send)
        except (Reject, HTTPException) as error:
            kind = Reject if isinstance(error, Reject) else HTTPException
            response = await self._refusals[kind](request, error)
            await response(scope, receive, send)


RATES = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
EXPOSED = ("x-request-id", "retry-after", *RATES)
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


def read_keys(gateway: Gateway) -> Keyring:
    """The keys of this replica. Raises ConfigError if they cannot be read."""
    return Keyring(gateway.config.api.keys_file, env.api_keys(), env.admin_keys())


def build(gateway: Gateway, keyring: Keyring, admin: bool = False) -> Edge:
    """The whole application of the main address, or of the administrative one."""
    api = gateway.config.api
    endpoints = [each for each in discover() if offered(each, api, admin)]
    retry_after_s = api.retry_after_s

    def refuse(request: Request, status: int, problem: errors.Problem, headers: dict[str, str]) -> Response:
        headers |= errors.headers_of(status, gateway.retry_after_s)
        if gateway.leaving:
            headers["connection"] = "close"
        return Response(body_of(request, status, problem), status, headers, "application/json")

    def body_of(request: Request, status: int, problem: errors.Problem) -> bytes:
        return errors.body_at(request.scope["path"], status, problem, request_id(request))

    async def on_reject(request: Request, error: Exception) -> Response:
        assert isinstance(error, Reject)
        status, problem = errors.of_reject(error)
        gateway.recorder.refusals.add(Kind.REFUSED, a=status, text=request_id(request).encode())
        # The message may quote the request; logs hold no user's text.
        RequestLogger(log, request_id(request)).info("refused: %d %s %s", status, problem.code, problem.param or "")
        return refuse(request, status, problem, {})

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path!r:.200}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed at {request.url.path}"
        elif error.status_code == 413:
            return TooLarge(body_of(request, 413, errors.problem(413, message)))
        problem = errors.problem(error.status_code, message)
        return refuse(request, error.status_code, problem, dict(error.headers or {}))

    async def on_fault(request: Request, error: Exception) -> Response:
        return refuse(request, 500, errors.problem(500, "internal error; the log of the server has more"), {})

    routes = [(each, _handler(gateway, each)) for each in endpoints]
    fixed = {(each.method, each.path): handle for each, handle in routes if "{" not in each.path}
    refusals: Refusals = {Reject: on_reject, HTTPException: on_http}
    app = Starlette(
        routes=[Route(each.path, handle, methods=[each.method]) for each, handle in routes],
        middleware=[Middleware(Direct, fixed, refusals)],
        exception_handlers={**refusals, Exception: on_fault},
    )
    app.router.redirect_slashes = False
    public = [each.path for each in endpoints if each.public]
    guarded: ASGIApp = app
    if keyring.needed:
        rights = [each.path for each in endpoints if each.admin]
        guarded = Guard(app, keyring, public, gateway.figures.edge, retry_after_s, rights)
    host = api.admin_host if admin else api.host
    if not (keyring.needed or is_loopback(host)):
        log.warning("anybody who reaches %s can use this server: no API keys are set", host)
    if (origins := api.cors_origins) and not admin:
        guarded = CORSMiddleware(
            guarded, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED
        )
    return Edge(guarded, gateway, [each.path for each in endpoints])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names only localhost counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _handler(gateway: Gateway, endpoint: Endpoint) -> Handler:
    async def handle(request: Request) -> ASGIApp:
        return await endpoint.handle(gateway, request)

    return handle

"""Around the routes: who may come in, and how much of it. Nothing but the public routes answers without a key, and
the administrative ones only to keys with that right.

Owns nothing; the keyring has the state. A key appears in no log, error or figure; its name does.
"""

import logging
import math
import time
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.log import RequestLogger
from services.api import errors
from services.api.figures import Answers
from services.api.keys import Excess, Keyring
from services.api.tenant import spent

log = logging.getLogger("api")
SCHEME = b"bearer"
LIMITED = "rate_limit_exceeded"  # the client's own limits; a queue that is full is "overloaded"


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        public: Iterable[str],
        figures: Answers,
        retry_after_s: int,
        admin: Iterable[str] = (),
    ) -> None:
        self._app, self._keyring, self._public = app, keyring, frozenset(public)
        self._figures, self._retry_after_s = figures, retry_after_s
        self._admin = frozenset(admin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        secret = bearer(scope["headers"])
        account = self._keyring.find(secret) if secret else None
        if account is None:
            await self._unknown(scope, bool(secret))(scope, receive, send)
            return
        state = scope["state"]
        state["owner"], name = account.key, account.key.name
        if scope["path"] in self._admin and not account.key.admin:
            await self._forbidden(scope, name)(scope, receive, send)
            return
        if scope["method"] != "POST":  # limits count work, not looking
            await self._app(scope, receive, send)
            return

        async def send_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *account.headers(time.monotonic())]
            await send(message)

        if excess := account.enter(time.monotonic()):
            self._figures.keys[name, "limited"] += 1
            await self._limited(scope, name, excess)(scope, receive, send_limits)
            return
        self._figures.keys[name, "accepted"] += 1
        try:
            await self._app(scope, receive, send_limits)
        finally:
            account.leave(time.monotonic(), spent(state.get("generation")))

    def _unknown(self, scope: Scope, given: bool) -> Response:
        if given:
            message, challenge = "the API key is not known", 'Bearer error="invalid_token"'
        else:
            message = "an API key is needed: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            challenge = "Bearer"
        problem = errors.problem(401, message)
        RequestLogger(log, scope["state"]["request_id"]).info("refused: 401, %s", "wrong key" if given else "no key")
        return _answer(scope, 401, problem, {"www-authenticate": challenge})

    def _forbidden(self, scope: Scope, name: str) -> Response:
        problem = errors.problem(403, "this API key may not use administrative routes", code="permission_denied")
        RequestLogger(log, scope["state"]["request_id"]).info("refused: 403, key %s is no administrator's", name)
        return _answer(scope, 403, problem, {})

    def _limited(self, scope: Scope, name: str, excess: Excess) -> Response:
        problem = errors.problem(429, excess.message, code=LIMITED)
        RequestLogger(log, scope["state"]["request_id"]).info("refused: 429, limits of key %s", name)
        wait_s = math.ceil(excess.wait_s) or self._retry_after_s
        return _answer(scope, 429, problem, {"retry-after": str(wait_s)})


def _answer(scope: Scope, status: int, problem: errors.Problem, headers: dict[str, str]) -> Response:
    body = errors.body_at(scope["path"], status, problem, scope["state"]["request_id"])
    return Response(body, status, headers, "application/json")


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of the one Authorization header, or else of the one x-api-key, which Anthropic's clients send; empty
    if there is none, several, or one of another scheme."""
    found: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
    for name, value in headers:
        if name in found:
            found[name].append(value)
    values, plain = found.values()
    if not values and len(plain) == 1:
        return plain[0].strip()
    if len(values) != 1:
        return b""
    scheme, _, secret = values[0].strip().partition(b" ")
    return secret.strip() if scheme.lower() == SCHEME else b""

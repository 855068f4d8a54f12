"""One line of a batch, answered as the endpoint would answer it over HTTP, without a connection.

It counts against the limits of its API key like any request, and goes behind all others of that key.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from common.api_keys import LATEST
from common.errors import Reject, RejectReason
from services.api import errors
from services.api.batches import results
from services.api.batches.keeper import Answer
from services.api.batches.records import Line
from services.api.bodies import Hold
from services.api.gateway import Gateway
from services.api.keys import Keyring
from services.api.route import Endpoint
from services.api.server import WIRE
from services.api.tenant import spent

AGAIN = (RejectReason.OVERLOADED, RejectReason.UNAVAILABLE)  # reasons that pass
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Unwatched:
    """In place of a client's connection: it does not go away."""

    on_lost: Callable[[], None] | None = None
    whole = True

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Nobody leaves."""


class Answering:
    def __init__(self, gateway: Gateway, keyring: Keyring, endpoints: dict[str, Endpoint]) -> None:
        self._gateway, self._keyring, self._endpoints = gateway, keyring, endpoints

    def alive(self) -> list[int]:
        """Incarnations of all API replicas; empty while this one is not among them, and so cannot know."""
        members = self._gateway.node.view.members
        found = [incarnation for incarnation, member in members.items() if member.peer.service == "api"]
        return found if self._gateway.node.process.incarnation in found else []

    def welcome(self) -> bool:
        """Whether more requests may begin: not while others wait, who would then wait for these."""
        return not (self._gateway.missing() or self._gateway.node.view.load.waiting)

    def able(self) -> bool:
        """Whether requests can be served at all."""
        return not self._gateway.missing()

    async def __call__(self, line: Line) -> Answer:
        identity, hold = results.new_name(), Hold(self._gateway.bodies)
        state: dict[str, Any] = {"request_id": identity, "arrived_s": time.monotonic(), "hold": hold}
        account = None
        if self._keyring.needed:
            account = self._keyring.named(line.owner)
            if account is None:
                problem = errors.problem(401, "the API key of this batch is not known any more")
                return Answer(False, _result(line, 401, identity, errors.encode(problem)))
            if account.enter(time.monotonic()):
                return Answer(False, None)
            state["owner"] = account.key
        try:
            status, body = await self._handle(line, state)
        finally:
            hold.release()
            if account is not None:
                account.leave(time.monotonic(), spent(state.get("generation")))
        if status is None:
            return Answer(False, None)
        return Answer(status == 200, _result(line, status, identity, body))

    async def _handle(self, line: Line, state: dict[str, Any]) -> tuple[int | None, bytes]:
        """Status and body; no status: later."""
        body = line.body
        if line.batch:
            body = msgspec.json.encode(FIELDS.decode(body) | {"priority": msgspec.Raw(b"%d" % LATEST)})

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http",
            "method": "POST",
            "path": line.endpoint,
            "query_string": b"",
            "headers": [],
            "state": state,
            "extensions": {WIRE: Unwatched()},
        }
        try:
            answer = await self._endpoints[line.endpoint].handle(self._gateway, Request(scope, receive))
        except Reject as reject:
            status, problem = errors.of_reject(reject)
            return None if reject.reason in AGAIN else status, errors.encode(problem)
        except HTTPException as error:
            return error.status_code, errors.encode(errors.problem(error.status_code, error.detail))
        assert isinstance(answer, Response), "the input was checked: nothing streams"
        return answer.status_code, bytes(answer.body)


def _result(line: Line, status: int, identity: str, body: bytes) -> bytes:
    return results.answered(line.custom, status, identity, body) if line.batch else body

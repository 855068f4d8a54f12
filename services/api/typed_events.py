"""Answers that other APIs tell as events with types: what of them is the API's is one pure object, a `Telling`.

A reply as a whole is what its events add up to, so both forms say the same. Owns nothing; one choice per request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from common.dialects.events import Content, Event, merged
from common.errors import Reject
from services.api import route
from services.api.gateway import Gateway
from services.api.generate import begin, collect, opened
from services.api.hub import Choice, Hub, Request
from services.api.schema.chat import ChatRequest, check_messages, submits_of, wanted_of
from services.api.schema.replies import Usage, usage_of, usage_so_far
from services.api.server import Wire
from services.api.sse import Stream

Told = list[dict[str, Any]]  # events; each has its "type"


class Telling(Protocol):
    """One answer in the words of an API. Called in this order: begin, feed, ..., end, conclude."""

    keep_alive: bytes

    def begin(self, usage: Usage) -> Told: ...
    def feed(self, events: list[Event]) -> Told: ...

    def end(self, choice: Choice, usage: Usage, failure: Reject | None) -> Told:
        """All text has come; what is still open is closed."""

    def conclude(self) -> Told:
        """The one terminal, and what comes with it."""

    @property
    def body(self) -> msgspec.Struct:
        """The whole reply."""


Keep = Callable[[], Awaitable[None]]  # called once between end and conclude


async def converse(
    gateway: Gateway, http: HttpRequest, asked: ChatRequest, telling: Telling, keep: Keep | None = None
) -> ASGIApp:
    """A chat, answered in the words of another API. Raises Reject while nothing is sent."""
    facts = gateway.facts()
    check_messages(asked.messages, gateway.config.api.max_messages)
    submits = submits_of(asked, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    request, wire, alarm = begin(gateway, http, asked, submits, wanted_of(asked))
    if asked.stream:
        slow_s = gateway.config.api.slow_client_s
        return await opened(TypedStream(request, gateway.hub, telling, wire, alarm, slow_s, keep), request)
    await collect(gateway, request, wire, alarm)
    telling.begin(usage_so_far(request))
    (choice,) = request.choices
    telling.feed(merged(news(choice)))
    telling.end(choice, usage_of(request), None)
    if keep is not None:
        await keep()
    return route.json(telling.body)


def news(choice: Choice) -> list[Event]:
    """What a chat's choice has said since the last call."""
    if choice.reads:
        return choice.read()
    text = choice.take()
    return [Content(text)] if text else []


def encoded(told: Told) -> bytes:
    """As server-sent events."""
    encode = msgspec.json.encode
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in told)


class TypedStream(Stream):
    def __init__(
        self,
        request: Request,
        hub: Hub,
        telling: Telling,
        wire: Wire,
        alarm: asyncio.TimerHandle | None,
        slow_s: float,
        keep: Keep | None = None,
    ) -> None:
        self._telling, self._keep = telling, keep
        self.keep_alive_event = telling.keep_alive
        super().__init__(request, hub, wire, alarm, slow_s)

    def _opening(self) -> bytes:
        return encoded(self._telling.begin(usage_so_far(self._request)))

    def _drain(self) -> bytes:
        if not self._request.updated:
            return b""
        self._request.updated.clear()
        return encoded(self._telling.feed(merged(news(self._request.choices[0]))))

    async def _last(self) -> bytes:
        request = self._request
        closing = self._telling.end(request.choices[0], usage_of(request), request.failure)
        if self._keep is not None:
            await self._keep()
        return encoded(closing + self._telling.conclude())

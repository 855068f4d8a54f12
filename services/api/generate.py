"""One generation from its Submits to the HTTP answer, streaming or whole; the two endpoints differ in their formats."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from common.errors import Reject
from common.protocol import Submit
from services.api import deadline, route
from services.api.answer import Wanted
from services.api.gateway import Gateway
from services.api.hub import Hub, Request
from services.api.logprobs import Form
from services.api.schema.generation import GenerationRequest, continuous_usage, wants_usage
from services.api.server import Wire, wire_of
from services.api.sse import Chunks, EventStream, Stream
from services.api.tenant import owned

# identity, creation time, model, finished request -> reply body
Reply = Callable[[str, int, str, Request], msgspec.Struct]


class Collector:
    """The reader of a request that is answered as a whole: waits for all terminals, or for the client to leave."""

    def __init__(self, request: Request, hub: Hub, wire: Wire, alarm: asyncio.TimerHandle | None = None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._hub, self._wire, self._alarm = request, hub, wire, alarm
        request.consumer = self
        wire.watch(self.lost)

    def update(self) -> None:
        if not self._request.open and not self.done.done():
            self.done.set_result(None)

    def keep_alive(self) -> None:
        """Nothing can be sent before the status is known."""

    def lost(self) -> None:
        self._hub.cancel(self._request)
        self.update()

    def close(self) -> None:
        self._wire.on_lost = None
        if self._alarm is not None:
            self._alarm.cancel()
        self._hub.cancel(self._request)


class Asked(Protocol):
    """What all bodies say of their request as a whole."""

    @property
    def stream(self) -> bool | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def deadline_ms(self) -> int | None: ...
    @property
    def request_id(self) -> str | None: ...
    def form(self) -> Form: ...


class Begun(NamedTuple):
    """A request on its way; whoever has it must read it, or the client's leaving is not noticed."""

    request: Request
    wire: Wire
    alarm: asyncio.TimerHandle | None


async def generate(
    gateway: Gateway,
    http: HttpRequest,
    model: str,
    asked: GenerationRequest,
    submits: list[Submit],
    reply: Reply,
    wanted: Wanted | None = None,
    echoes: Sequence[str] = (),
) -> ASGIApp:
    """Opens the request, waits for the first news (stream) or the last (whole). Raises Reject while nothing is sent.

    `wanted`: of a chat. `echoes`: what stands before the text of each prompt's choices.
    """
    identity = f"{'chatcmpl' if wanted else 'cmpl'}-{asked.request_id or route.request_id(http)}"
    request, wire, alarm = begin(gateway, http, asked, submits, wanted, echoes)
    created = int(time.time())
    if not asked.stream:
        await collect(gateway, request, wire, alarm)
        return route.json(reply(identity, created, model, request))
    chunks = Chunks(
        "chat" if wanted else "completion", identity, created, model, wants_usage(asked), continuous_usage(asked)
    )
    slow_s = gateway.config.api.slow_client_s
    return await opened(EventStream(request, gateway.hub, chunks, wire, wants_usage(asked), alarm, slow_s), request)


def begin(
    gateway: Gateway,
    http: HttpRequest,
    asked: Asked,
    submits: list[Submit],
    wanted: Wanted | None = None,
    echoes: Sequence[str] = (),
) -> Begun:
    """Opens the request. Raises Reject, with nothing left open."""
    limit = gateway.config.api.max_buffered_events if asked.stream else 0
    left_s = deadline.left_s(http, gateway.config.api, asked.deadline_ms)
    state, shared = http.scope["state"], gateway.config.kv.share_prefix_across_tenants
    submits = [owned(submit, state.get("owner"), asked.priority, shared) for submit in submits]
    if begun := state.get("trace"):
        begun.operation, begun.model = "chat" if wanted else "text_completion", gateway.facts().name
        submits = [msgspec.structs.replace(submit, trace=begun.own.text) for submit in submits]
    request = state["generation"] = gateway.open(submits, state["arrived_s"], limit)
    form = asked.form()._replace(name=asked.request_id or route.request_id(http))
    request.wanted, request.echoes, request.form = wanted, echoes, form
    gateway.record_received(route.request_id(http), request)
    return Begun(request, wire_of(http.scope), deadline.set_alarm(gateway.hub, request, left_s))


async def collect(gateway: Gateway, request: Request, wire: Wire, alarm: asyncio.TimerHandle | None) -> None:
    """Waits for the end of all choices. Raises Reject."""
    collector = Collector(request, gateway.hub, wire, alarm)
    try:
        await collector.done
    finally:
        collector.close()
    raise_failure(request)


async def opened(stream: Stream, request: Request) -> Stream:
    """The stream, once its request cannot be refused any more. Raises Reject."""
    try:
        await stream.opened
        raise_failure(request)  # nothing was sent: it gets its status
    except (Reject, asyncio.CancelledError):
        stream.close()
        raise
    return stream


def raise_failure(request: Request) -> None:
    if request.failure is not None:
        raise request.failure

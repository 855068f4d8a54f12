"""POST /abort, and how much there is to do: GET /load."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from services.api.gateway import Gateway
from services.api.route import Endpoint, json, read_body
from services.api.schema.parse import Body
from services.api.tenant import tenant_of


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The id that the client gave a request, or that of its answer."""

    request_id: Annotated[str, Meta(min_length=1, max_length=256)]


class Aborted(msgspec.Struct, frozen=True):
    """`aborted`: how many this replica had; its siblings end theirs, too."""

    request_id: str
    aborted: int


class LoadReply(msgspec.Struct, frozen=True):
    """`server_load`: requests that run or wait, as vLLM says it: of this replica as it is now, of its siblings as the
    schedulers last told. So did they tell the rest."""

    server_load: int
    running: int
    waiting: int
    waiting_tokens: int
    wait_s: float
    kv_cache_usage: float


BODY = Body(AbortRequest)


async def abort(gateway: Gateway, http: Request) -> Response:
    asked = BODY.parse(await read_body(http, gateway.config.api))
    return json(Aborted(asked.request_id, gateway.abort(asked.request_id, tenant_of(http))))


async def show_load(gateway: Gateway, http: Request) -> Response:
    load = gateway.node.view.load
    free = load.blocks_free + load.blocks_cached
    usage = 1 - free / load.blocks_total if load.blocks_total else 0.0
    own, told = len(gateway.hub.choices), load.running + load.waiting
    known = max(own, told) if gateway.siblings() else own
    return json(LoadReply(known, load.running, load.waiting, load.waiting_tokens, load.wait_s, usage))


ENDPOINTS = [
    Endpoint("POST", "/abort", abort, "Ends requests by their id", body=BODY, reply=Aborted),
    Endpoint("GET", "/load", show_load, "How much there is to do", reply=LoadReply),
]

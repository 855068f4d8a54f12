"""/v1/responses: OpenAI's conversations that the server remembers."""

import time

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from common.errors import Reject, RejectReason
from services.api.batches import records
from services.api.batches.responses import OPEN
from services.api.errors import invalid
from services.api.gateway import Gateway
from services.api.response_events import ResponseEvents, new_name
from services.api.route import Endpoint, json, read_body
from services.api.schema.batches import Page
from services.api.schema.chat import submits_of, wanted_of
from services.api.schema.conversion import chat_of, renamed
from services.api.schema.generation import check_model
from services.api.schema.logprobs import ChatLogprobs, content_of
from services.api.schema.response_object import ItemList, ResponseDeleted, ResponseObject, response_of
from services.api.schema.responses import (
    BODY,
    NAMES,
    InputItem,
    ResponsesRequest,
    chat_fields,
    check,
    input_items,
    not_found,
)
from services.api.schema.responses import converse as conversation_of
from services.api.tenant import tenant_of
from services.api.typed_events import converse

ITEMS = msgspec.json.Decoder(list[InputItem])
ANSWERED = ("completed", "incomplete")
MOST_LISTED = 100


class Kept(msgspec.Struct):
    """What is needed of a response object that is kept. Its output is part of the next one's input."""

    output: list[InputItem]
    background: bool


KEPT = msgspec.json.Decoder(Kept)


async def create_response(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    check(asked)
    check_model(asked.model, facts)
    items = input_items(asked)
    talk = conversation_of(asked, await _earlier(gateway, http, asked), items)
    tools = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(asked.tools or ()))}
    response = response_of(asked, new_name("resp"), int(time.time()), facts.name)
    with renamed(NAMES | tools | talk.places):
        chat = chat_of(chat_fields(asked, talk))
        if asked.background:
            # what cannot be is refused now
            submits_of(chat, facts, gateway.max_choices, gateway.config.api.max_logprobs)
            wanted_of(chat)
            return await _put_behind(gateway, http, response, items, body)

        async def keep() -> None:
            """A store that fails costs the memory of this answer, not the answer."""
            try:
                await _add(gateway, http, response, items)
            except Reject:
                response.store = False

        def reports() -> ChatLogprobs | None:
            return content_of(http.scope["state"]["generation"].choices[0])

        return await converse(gateway, http, chat, ResponseEvents(response, reports), keep if response.store else None)


async def _earlier(gateway: Gateway, http: HttpRequest, asked: ResponsesRequest) -> list[InputItem]:
    """All items of the conversation before this request. Raises Reject."""
    name, param = asked.previous_response_id, "previous_response_id"
    if name is None:
        return []
    owner, most = tenant_of(http), gateway.config.api.max_messages
    chain = await gateway.keeper.call(lambda store: store.responses.chain(name, owner, most))
    if not chain:
        raise not_found(name, param)
    if len(chain) >= most:
        raise invalid(f"the conversation has more than {most} responses", param)
    if missing := chain[0].previous:
        raise Reject(RejectReason.NOT_FOUND, f"an earlier response, {missing}, is not kept any more", param)
    found: list[InputItem] = []
    for each in chain:
        if each.status not in ANSWERED:
            raise invalid(f"the response {each.id} is {each.status}; it cannot be gone on from", param)
        found += ITEMS.decode(each.input) + KEPT.decode(each.body).output
    return found


async def _put_behind(
    gateway: Gateway, http: HttpRequest, response: ResponseObject, items: list[InputItem], body: bytes
) -> Response:
    """Keeps the request; any replica answers it."""
    response.status = "queued"
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    request = msgspec.json.encode(fields | {"background": False, "store": False})
    await _add(gateway, http, response, items, request)
    gateway.keeper.tell()
    return json(response)


async def _add(
    gateway: Gateway,
    http: HttpRequest,
    response: ResponseObject,
    items: list[InputItem],
    request: bytes | None = None,
) -> None:
    """Raises Reject."""
    api = gateway.config.api
    named = [msgspec.structs.replace(item, id=item.id or new_name("item")) for item in items]
    record = records.Response(
        response.id,
        tenant_of(http),
        response.created_at,
        response.status,
        response.previous_response_id,
        msgspec.json.encode(named).decode(),
        msgspec.json.encode(response).decode(),
        request,
    )
    limits = api.max_open_requests, api.max_responses, api.response_bytes
    if not await gateway.keeper.call(lambda store: store.responses.add(record, *limits)):
        text = f"{api.max_open_requests} responses are in the background already, try again later"
        raise Reject(RejectReason.OVERLOADED, text)


async def show_response(gateway: Gateway, http: HttpRequest) -> Response:
    for name in ("stream", "starting_after"):
        if http.query_params.get(name, "false") != "false":
            raise invalid(f"{name} is not supported by this server: a kept response does not stream", name)
    return _whole(await _found(gateway, http))


async def cancel_response(gateway: Gateway, http: HttpRequest) -> Response:
    record = await _found(gateway, http)
    if not KEPT.decode(record.body).background:
        raise invalid("only a response in the background can be cancelled", "response_id")
    if record.status in OPEN:
        await gateway.keeper.call(lambda store: store.responses.cancel(record.id, record.owner))
        gateway.keeper.tell()
        record = await _found(gateway, http)
    return _whole(record)


async def delete_response(gateway: Gateway, http: HttpRequest) -> Response:
    record = await _found(gateway, http)
    await gateway.keeper.call(lambda store: store.responses.delete(record.id, record.owner))
    gateway.keeper.tell()
    return json(ResponseDeleted(record.id))


async def list_input_items(gateway: Gateway, http: HttpRequest) -> Response:
    record = await _found(gateway, http)
    return json(ItemList(**Page(ITEMS.decode(record.input), http.query_params, MOST_LISTED).fields()))


async def _found(gateway: Gateway, http: HttpRequest) -> records.Response:
    identity, owner = http.path_params["response_id"], tenant_of(http)
    record = await gateway.keeper.call(lambda store: store.responses.find(identity, owner))
    if record is None:
        raise not_found(identity)
    return record


def _whole(record: records.Response) -> Response:
    return Response(record.body, media_type="application/json")


ONE = "/v1/responses/{response_id}"
ENDPOINTS = [
    Endpoint(
        "POST", "/v1/responses", create_response, "Answers and remembers", body=BODY, reply=ResponseObject, batched=True
    ),
    Endpoint("GET", ONE, show_response, "A response that is kept", reply=ResponseObject),
    Endpoint("DELETE", ONE, delete_response, "Forgets a response", reply=ResponseDeleted),
    Endpoint("POST", f"{ONE}/cancel", cancel_response, "Ends one in the background", reply=ResponseObject),
    Endpoint("GET", f"{ONE}/input_items", list_input_items, "What it was asked", reply=ItemList),
]

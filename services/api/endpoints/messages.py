"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

import re

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from common.protocol import PromptKind, Tokenize, Tokenized
from services.api.deadline import left_s, within
from services.api.errors import invalid
from services.api.gateway import Gateway
from services.api.message_events import MessageEvents
from services.api.response_events import new_name
from services.api.route import Endpoint, json, read_body
from services.api.schema.chat import check_messages, submits_of
from services.api.schema.conversion import chat_of, renamed
from services.api.schema.message_object import MessageObject, TokenCount
from services.api.schema.messages import BODY, COUNT, NAMES, CountRequest, chat_fields
from services.api.schema.messages import converse as conversation_of
from services.api.typed_events import converse

VERSION, DATE = "anthropic-version", re.compile(r"\d{4}-\d{2}-\d{2}")
EVENTS_SINCE = "2023-06-01"


async def create_message(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    check_version(http)
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    talk = conversation_of(asked)
    with renamed(names(asked) | talk.places):
        chat = chat_of(chat_fields(asked, talk))
        message = MessageObject(id=new_name("msg"), model=facts.name)
        return await converse(gateway, http, chat, MessageEvents(message))


async def count_tokens(gateway: Gateway, http: HttpRequest) -> Response:
    check_version(http)
    api = gateway.config.api
    body = await read_body(http, api)
    facts = gateway.facts()
    asked = COUNT.parse(body)
    talk = conversation_of(asked)
    with renamed(names(asked) | talk.places):
        chat = chat_of(chat_fields(asked, talk))
        check_messages(chat.messages, api.max_messages)
        (submit,) = submits_of(chat, facts, gateway.max_choices)
        async with within(left_s(http, api)):
            reply = await gateway.ask(Tokenize(0, PromptKind.CHAT, submit=submit))
    assert isinstance(reply, Tokenized)
    return json(TokenCount(len(reply.tokens) // 4))


def names(asked: CountRequest) -> dict[str, str]:
    """The chat's names of fields, and this API's."""
    tools = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(asked.tools or ()))}
    return NAMES | tools | {f"{name}.parameters": f"{tools[name]}.input_schema" for name in tools}


def check_version(http: HttpRequest) -> None:
    """Clients name the date of the API that they know; all have this form of it since 2023-06-01. Raises Reject."""
    given = http.headers.get(VERSION, EVENTS_SINCE)
    if not DATE.fullmatch(given) or given < EVENTS_SINCE:
        raise invalid(f"{VERSION} must be a date from {EVENTS_SINCE} on", VERSION)


ENDPOINTS = [
    Endpoint("POST", "/v1/messages", create_message, "Answers as Anthropic does", body=BODY, reply=MessageObject),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Tokens of such a request", body=COUNT, reply=TokenCount
    ),
]

"""POST /v1/chat/completions."""

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from services.api.gateway import Gateway
from services.api.generate import generate
from services.api.hub import WORDS, Request
from services.api.route import Endpoint, read_body
from services.api.schema.chat import BODY, check_messages, submits_of
from services.api.schema.replies import AssistantMessage, ChatChoice, ChatCompletion, stop_reason, usage_of


async def chat_completions(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    check_messages(asked.messages, gateway.config.api.max_messages)
    submits = submits_of(asked, facts, gateway.max_choices)
    return await generate(gateway, http, facts.name, asked, submits, "chat", reply)


def reply(identity: str, created: int, model: str, request: Request) -> ChatCompletion:
    choices = []
    for choice in request.choices:
        assert choice.finished is not None
        message = AssistantMessage(choice.take())
        word = WORDS[choice.finished.reason]
        choices.append(ChatChoice(choice.index, message, word, stop_reason(choice.finished)))
    return ChatCompletion(identity, created, model, choices, usage_of(request))


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answers a conversation",
        body=BODY,
        reply=ChatCompletion,
        batched=True,
    )
]

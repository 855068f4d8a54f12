"""POST /v1/completions."""

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from services.api.gateway import Gateway
from services.api.generate import generate
from services.api.hub import WORDS, Request
from services.api.route import Endpoint, read_body
from services.api.schema.completion import BODY, submits_of
from services.api.schema.replies import TextChoice, TextCompletion, stop_reason, usage_of


async def completions(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    submits = submits_of(asked, facts, gateway.max_choices)
    return await generate(gateway, http, facts.name, asked, submits, "completion", reply)


def reply(identity: str, created: int, model: str, request: Request) -> TextCompletion:
    choices = []
    for choice in request.choices:
        assert choice.finished is not None
        word = WORDS[choice.finished.reason]
        choices.append(TextChoice(choice.index, choice.take(), word, stop_reason(choice.finished)))
    return TextCompletion(identity, created, model, choices, usage_of(request))


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Continues text or tokens",
        body=BODY,
        reply=TextCompletion,
        batched=True,
    )
]

"""POST /v1/completions."""

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from common.protocol import Detokenize, Detokenized, PromptKind, Submit
from services.api.deadline import left_s, within
from services.api.gateway import Gateway
from services.api.generate import generate
from services.api.hub import Request
from services.api.route import Endpoint, read_body
from services.api.schema.completion import BODY, CompletionRequest, submits_of
from services.api.schema.logprobs import chosen, columns_of, prompt_logprobs_of
from services.api.schema.replies import TextChoice, TextCompletion, ids_of, stop_reason, usage_of


async def completions(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    submits = submits_of(asked, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    echoes = [await text_of(gateway, http, asked, submit) for submit in submits] if asked.echo else []
    return await generate(gateway, http, facts.name, asked, submits, reply, echoes=echoes)


async def text_of(gateway: Gateway, http: HttpRequest, asked: CompletionRequest, submit: Submit) -> str:
    """A prompt as text. Raises Reject."""
    if submit.kind is PromptKind.TEXT:
        return submit.text
    async with within(left_s(http, gateway.config.api, asked.deadline_ms)):
        answer = await gateway.ask(Detokenize(0, submit.tokens))
    assert isinstance(answer, Detokenized)
    return answer.text


def reply(identity: str, created: int, model: str, request: Request) -> TextCompletion:
    choices = []
    for index, choice in enumerate(chosen(request)):
        assert choice.finished is not None
        text = choice.echo + choice.take()
        told = stop_reason(choice.finished), columns_of(choice), *ids_of(choice)
        choices.append(TextChoice(index, text, choice.word, *told, prompt_logprobs_of(choice)))
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

"""Requests as token ids: what one renders to, without running it, and generation from ids to ids."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from common.columns import unpack_i32
from common.protocol import Describe, Detokenized, Submit, Tokenize, Tokenized
from services.api.deadline import left_s, within
from services.api.gateway import Gateway
from services.api.generate import begin, generate, opened
from services.api.hub import Request
from services.api.route import Endpoint, json, read_body, request_id
from services.api.schema import chat, completion, tokens
from services.api.schema.conversion import renamed
from services.api.schema.generation import wants_usage
from services.api.schema.logprobs import chosen, content_of, prompt_logprobs_of
from services.api.schema.replies import ids_of, stop_reason, usage_of
from services.api.schema.tokens import Generated, GeneratedChoice, Rendered, TokenizerInfo
from services.api.token_stream import TokenStream


async def render_chat(gateway: Gateway, http: HttpRequest) -> Response:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = chat.BODY.parse(body)
    chat.check_messages(asked.messages, gateway.config.api.max_messages)
    (submit,) = chat.submits_of(asked, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    ids = await prompt_of(gateway, http, submit)
    room = facts.max_model_len - len(ids)
    return json(tokens.rendered(asked, ids, asked.request_id or request_id(http), room))


async def render_completion(gateway: Gateway, http: HttpRequest) -> Response:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = completion.BODY.parse(body)
    submits = completion.submits_of(asked, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    identity = asked.request_id or request_id(http)
    found = [await prompt_of(gateway, http, submit) for submit in submits]
    return json([tokens.rendered(asked, ids, identity, 0) for ids in found])


async def prompt_of(gateway: Gateway, http: HttpRequest, submit: Submit) -> list[int]:
    """The tokens that a request would run. Raises Reject."""
    async with within(left_s(http, gateway.config.api)):
        reply = await gateway.ask(Tokenize(0, submit.kind, submit=submit))
    assert isinstance(reply, Tokenized)
    return unpack_i32(reply.tokens).tolist()


async def generate_tokens(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = tokens.BODY.parse(body)
    with renamed(tokens.names(asked)):
        same = tokens.completion_of(asked, facts.max_model_len)
        submits = completion.submits_of(same, facts, gateway.max_choices, gateway.config.api.max_logprobs)
        if not same.stream:
            return await generate(gateway, http, facts.name, same, submits, generated)
        request, wire, alarm = begin(gateway, http, same, submits)
        slow_s = gateway.config.api.slow_client_s
        return await opened(TokenStream(request, gateway.hub, wire, wants_usage(same), alarm, slow_s), request)


def generated(identity: str, created: int, model: str, request: Request) -> Generated:
    choices = []
    for index, choice in enumerate(chosen(request)):
        assert choice.finished is not None
        _, ids = ids_of(choice)
        found = ids if isinstance(ids, list) else []
        told = stop_reason(choice.finished), content_of(choice)
        choices.append(GeneratedChoice(index, found, choice.word, *told))
    scored = prompt_logprobs_of(request.choices[0])
    return Generated(request.form.name, choices, usage_of(request), scored)


async def tokenizer_info(gateway: Gateway, http: HttpRequest) -> Response:
    async with within(left_s(http, gateway.config.api)):
        reply = await gateway.ask(Describe(0))
    assert isinstance(reply, Detokenized)
    return Response(reply.text, media_type="application/json")


ENDPOINTS = [
    Endpoint("POST", "/v1/chat/completions/render", render_chat, "A chat as token ids", body=chat.BODY, reply=Rendered),
    Endpoint(
        "POST",
        "/v1/completions/render",
        render_completion,
        "Prompts as token ids",
        body=completion.BODY,
        reply=list[Rendered],
    ),
    Endpoint("POST", "/inference/v1/generate", generate_tokens, "From ids to ids", body=tokens.BODY, reply=Generated),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, "Special tokens and chat template", reply=TokenizerInfo),
]

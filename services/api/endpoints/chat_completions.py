"""POST /v1/chat/completions."""

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from services.api.gateway import Gateway
from services.api.generate import generate
from services.api.hub import Request
from services.api.route import Endpoint, read_body
from services.api.schema.chat import BODY, LIST_BODY, chats_of, check_messages, echo_of, submits_of, wanted_of
from services.api.schema.conversion import renamed
from services.api.schema.generation import check_common
from services.api.schema.logprobs import chosen, content_of, prompt_logprobs_of
from services.api.schema.replies import ChatChoice, ChatCompletion, ids_of, message_of, stop_reason, usage_of


async def chat_completions(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    check_messages(asked.messages, gateway.config.api.max_messages)
    submits = submits_of(asked, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    return await generate(gateway, http, facts.name, asked, submits, reply, wanted_of(asked), [echo_of(asked)])


async def chat_list(gateway: Gateway, http: HttpRequest) -> ASGIApp:
    """Many conversations with the same fields: choices conversation by conversation."""
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = LIST_BODY.parse(body)
    chats = chats_of(asked)
    submits = []
    for i, chat in enumerate(chats):
        check_messages(chat.messages, gateway.config.api.max_messages)
        with renamed({"messages": f"messages[{i}]"}):
            submits += submits_of(chat, facts, gateway.max_choices, gateway.config.api.max_logprobs)
    check_common(chats[0], facts, sum(submit.n for submit in submits), gateway.max_choices)
    echoes = [echo_of(chat) for chat in chats]
    return await generate(gateway, http, facts.name, chats[0], submits, reply, wanted_of(chats[0]), echoes)


def reply(identity: str, created: int, model: str, request: Request) -> ChatCompletion:
    choices = []
    for index, choice in enumerate(chosen(request)):
        assert choice.finished is not None
        message = message_of(choice)
        prompt, ids = ids_of(choice)
        told = stop_reason(choice.finished), content_of(choice), ids
        choices.append(ChatChoice(index, message, choice.word, *told))
    scored = prompt_logprobs_of(request.choices[0])
    usage = usage_of(request)
    return ChatCompletion(identity, created, model, choices, usage, prompt_token_ids=prompt, prompt_logprobs=scored)


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answers a conversation",
        body=BODY,
        reply=ChatCompletion,
        batched=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions/batch",
        chat_list,
        "Answers many conversations",
        body=LIST_BODY,
        reply=ChatCompletion,
    ),
]

"""POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from common.columns import pack_i32, unpack_i32
from common.protocol import Detokenize, Detokenized, ModelFacts, PromptKind, Tokenize, Tokenized
from common.text_format import ANSWER, GOES_ON
from services.api.deadline import left_s, within
from services.api.errors import invalid
from services.api.gateway import Gateway
from services.api.route import Endpoint, json, read_body
from services.api.schema.chat import (
    MAX_CALLS,
    ChatRequest,
    Message,
    Tool,
    check_messages,
    messages_json,
    prompt_end,
    template_kwargs,
    tools_of,
)
from services.api.schema.generation import ABSENT, TokenId, check_ids, check_model
from services.api.schema.parse import Body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`, the latter with what a template gets besides."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_CALLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    model: str | None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    prompt: str


TOKENIZE = Body(TokenizeRequest, {"chat_template": ABSENT})
DETOKENIZE = Body(DetokenizeRequest)


def question(asked: TokenizeRequest, facts: ModelFacts) -> Tokenize:
    """Raises Reject."""
    check_model(asked.model, facts)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if asked.messages is None:
        special = asked.add_special_tokens is not False
        return Tokenize(0, PromptKind.TEXT, text=asked.prompt or "", add_special_tokens=special)
    chat = ChatRequest(
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
    )
    end = prompt_end(chat)
    return Tokenize(
        0,
        PromptKind.CHAT,
        messages=messages_json(asked.messages),
        add_special_tokens=bool(asked.add_special_tokens),
        add_generation_prompt=end == ANSWER,
        template_kwargs=msgspec.json.encode(template_kwargs(chat, tools_of(chat))),
        goes_on=end == GOES_ON,
    )


async def tokenize(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, gateway.config.api)
    facts = gateway.facts()
    asked = TOKENIZE.parse(body)
    check_messages(asked.messages, gateway.config.api.max_messages)
    async with within(left_s(request, gateway.config.api)):
        reply = await gateway.ask(question(asked, facts))
    assert isinstance(reply, Tokenized)
    tokens = unpack_i32(reply.tokens).tolist()
    strings = reply.token_strings if asked.return_token_strs else None
    return json(TokenizeReply(len(tokens), facts.max_model_len, tokens, strings))


async def detokenize(gateway: Gateway, request: Request) -> Response:
    body = await read_body(request, gateway.config.api)
    facts = gateway.facts()
    asked = DETOKENIZE.parse(body)
    check_model(asked.model, facts)
    check_ids(asked.tokens, facts, "tokens")
    async with within(left_s(request, gateway.config.api)):
        reply = await gateway.ask(Detokenize(0, pack_i32(asked.tokens)))
    assert isinstance(reply, Detokenized)
    return json(DetokenizeReply(reply.text))


ENDPOINTS = [
    Endpoint("POST", "/tokenize", tokenize, "Text or messages to token ids", body=TOKENIZE, reply=TokenizeReply),
    Endpoint("POST", "/detokenize", detokenize, "Token ids to text", body=DETOKENIZE, reply=DetokenizeReply),
]

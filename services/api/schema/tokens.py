"""Requests and replies in token ids: what one renders to, and generation from ids to ids, in vLLM's shapes. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from services.api.errors import invalid
from services.api.schema import completion
from services.api.schema.completion import CompletionRequest, TokenIds
from services.api.schema.generation import ABSENT, GenerationRequest, Milliseconds, StreamOptions
from services.api.schema.logprobs import ChatLogprobs, PromptLogprobs
from services.api.schema.parse import Body, Harmless, anything, one_of
from services.api.schema.replies import Usage


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """What `/inference/v1/generate` takes for the same tokens."""

    request_id: str
    model: str | None = None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    cache_salt: str | None = None
    priority: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: TokenIds
    sampling_params: dict[str, Any] = {}  # as in completions
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_ms: Milliseconds | None = None


class GeneratedChoice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class Generated(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class GeneratedPart(msgspec.Struct, frozen=True):
    """An event of a stream: tokens of one choice since its last one, or the usage at the end."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage | None = None


PROMPT_IDS = ("prompt_logprob_token_ids", "prompt_logprob_start")  # vLLM's, which completions do not have
UNSUPPORTED: dict[str, Harmless] = {
    "features": ABSENT,
    "kv_transfer_params": ABSENT,
    "prompt_logprobs": ABSENT,
    "arrival_time": anything,
    "output_mode": one_of("tokens"),
    "parse_context": ABSENT,
    "content_parts": ABSENT,
    "ec_transfer_params": ABSENT,
}
BODY = Body(GenerateRequest, UNSUPPORTED)
OUTSIDE = (
    "model",
    "request_id",
    "cache_salt",
    "priority",
    "deadline_ms",
    "stream",
    "stream_options",
)  # of the parameters of sampling
NOT_TOLD = ("echo", "top_logprobs", "return_tokens_as_token_ids")  # by this endpoint
NO_SAMPLING = (
    *(*OUTSIDE, "user", "truncate_prompt_tokens", "return_token_ids"),
    "return_tokens_as_token_ids",
)


def completion_of(asked: GenerateRequest, context: int) -> CompletionRequest:
    """The same as a completion that tells its token ids. `context`: of the model, in tokens. Raises Reject."""
    room = max(context - len(asked.token_ids), 1)
    given = {name: value for name, value in asked.sampling_params.items() if name not in ("detokenize", "output_kind")}
    for name in (*OUTSIDE, *NOT_TOLD, *PROMPT_IDS, "prompt", "return_token_ids"):
        if name in given:
            raise invalid(
                f"sampling_params.{name} is not supported here; use /v1/completions", f"sampling_params.{name}"
            )
    fields = {name: getattr(asked, name) for name in OUTSIDE} | given
    fields |= {"prompt": asked.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if fields.get("max_tokens") is None and fields.get("max_completion_tokens") is None:
        fields["max_tokens"] = room  # as vLLM does, unlike completions
    return completion.BODY.parse(msgspec.json.encode(fields))


def names(asked: GenerateRequest) -> Mapping[str, str]:
    """Fields of the completion, as the client has them."""
    return {"prompt": "token_ids"} | {name: f"sampling_params.{name}" for name in asked.sampling_params}


def rendered(asked: GenerationRequest, tokens: list[int], identity: str, room: int) -> Rendered:
    """`room`: tokens that the context leaves, which bound a chat that gives no bound."""
    given = {name: getattr(asked, name) for name in GenerationRequest.__struct_fields__ if name not in NO_SAMPLING}
    params = {name: value for name, value in msgspec.to_builtins(given).items() if value is not None}
    if asked.max_tokens is None and asked.max_completion_tokens is None:
        completes = isinstance(asked, CompletionRequest)
        params["max_tokens"] = completion.DEFAULT_MAX_TOKENS if completes else max(room, 1)
    return Rendered(
        request_id=identity,
        model=asked.model,
        token_ids=tokens,
        sampling_params=params,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
    )


class TokenizerInfo(msgspec.Struct, frozen=True):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None

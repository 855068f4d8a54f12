"""Reply bodies of the generation endpoints, and the usage that both forms of reply report. Pure."""

from typing import Literal

import msgspec

from common.protocol import FinishReason, TextFinished
from services.api.hub import Request


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: None = None


class TextCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


def usage_of(request: Request) -> Usage:
    """Each prompt counts once, however many choices share it; every choice's output counts."""
    prompt = cached = output = 0
    for choice in request.choices:
        finished = choice.finished
        if finished is None:
            continue
        output += finished.output_tokens
        if choice.origin == choice.first:
            prompt += finished.prompt_tokens
            cached += finished.cached_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


def stop_reason(finished: TextFinished) -> int | str | None:
    """vLLM's extension: the stop string or stop token id, None for the model's own end."""
    if finished.reason is FinishReason.STOP_STRING:
        return finished.stop_string
    return finished.stop_token if finished.reason is FinishReason.STOP_TOKEN else None

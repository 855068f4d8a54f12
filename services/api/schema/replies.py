"""Reply bodies of the generation endpoints, and the usage that both forms of reply report. Pure."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from common.columns import unpack_i32
from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from common.protocol import FinishReason, TextFinished
from services.api.hub import Choice, Request
from services.api.schema.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails(0)


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class CallMade(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET  # DeepSeek's and SGLang's name of it
    reasoning: str | UnsetType = UNSET  # vLLM's
    tool_calls: list[CallMade] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


def message_of(choice: Choice) -> AssistantMessage:
    """All that a finished choice of a chat says."""
    if not choice.reads:
        return AssistantMessage(choice.echo + choice.take())
    content, reasoning = choice.echo, ""
    calls: list[tuple[CallBegun, list[str]]] = []
    for event in choice.read():
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegun):
            calls.append((event, []))
        else:
            calls[event.call][1].append(event.text)
    made = [CallMade(call.identity, CalledFunction(call.name, "".join(parts))) for call, parts in calls]
    return AssistantMessage(
        content or (None if made else ""),
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=made or UNSET,
    )


def delta_of(event: Event) -> dict[str, Any]:
    """The same as a stream tells it, piece by piece."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    call: dict[str, Any] = {"index": event.call}
    if isinstance(event, Arguments):
        return {"tool_calls": [call | {"function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [call | {"id": event.identity, "type": "function", "function": function}]}


def ids_of(choice: Choice) -> tuple[list[int] | UnsetType, list[int] | UnsetType]:
    """Token ids of the prompt and of the output, where they are wanted."""
    if not choice.submit.options.token_ids or choice.answer is None:
        return UNSET, UNSET
    return unpack_i32(choice.answer.told.prompt).tolist(), choice.answer.take_ids()


def usage_so_far(request: Request, opening: bool = False) -> Usage:
    """Of a request that may go on: its tokens that have come. Cached ones are known at the end.

    `opening`: of a chunk before all of them.
    """
    answers = [choice.answer for choice in request.choices if choice.origin == choice.first]
    prompt = sum(answer.told.prompt_tokens for answer in answers if answer is not None)
    output = 0 if opening else sum(choice.received for choice in request.choices)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(0))


def usage_of(request: Request) -> Usage:
    """Each prompt counts once, however many choices share it; every choice's output counts."""
    prompt = cached = output = reasoning = 0
    for choice in request.choices:
        finished = choice.finished
        if finished is None:
            continue
        output += finished.output_tokens
        reasoning += finished.reasoning_tokens
        if choice.origin == choice.first:
            prompt += finished.prompt_tokens
            cached += finished.cached_tokens
    details = PromptTokensDetails(cached), CompletionTokensDetails(reasoning)
    return Usage(prompt, output, prompt + output, *details)


def stop_reason(finished: TextFinished) -> int | str | None:
    """vLLM's extension: the stop string or stop token id, or that it repeated itself; None for the model's own end."""
    if finished.reason is FinishReason.STOP_STRING:
        return finished.stop_string
    if finished.reason is FinishReason.REPETITION:
        return "repetition_detected"
    return finished.stop_token if finished.reason is FinishReason.STOP_TOKEN else None

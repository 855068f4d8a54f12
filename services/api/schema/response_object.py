"""The response object of /v1/responses with its output items, and what is listed beside it. Values only."""

from typing import Any, Literal

import msgspec

from services.api.schema.logprobs import ContentLogprob
from services.api.schema.replies import Usage
from services.api.schema.responses import InputItem, Reasoning, ResponsesRequest, TextFormat, TextOptions

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: TextOptions = TextOptions(format=TextFormat(type="text"))
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}


class ResponseDeleted(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def response_of(asked: ResponsesRequest, identity: str, created: int, model: str) -> ResponseObject:
    """Before anything has come of it."""
    options = asked.text or TextOptions()
    return ResponseObject(
        id=identity,
        created_at=created,
        background=bool(asked.background),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        reasoning=asked.reasoning or Reasoning(),
        store=asked.store is not False,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        text=msgspec.structs.replace(options, format=options.format or TextFormat(type="text")),
        tool_choice=asked.tool_choice or "auto",
        tools=[msgspec.to_builtins(tool) for tool in asked.tools or ()],
        top_logprobs=asked.top_logprobs or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        truncation=asked.truncation or "disabled",
        user=asked.user,
        metadata=asked.metadata or {},
    )


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )

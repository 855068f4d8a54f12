"""The body of /v1/responses, as the chat that it asks for. Pure."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import Reject, RejectReason
from services.api.errors import invalid
from services.api.schema.batches import Metadata
from services.api.schema.chat import MAX_CALLS, MAX_PARTS, ContentPart, Name
from services.api.schema.conversion import Conversation, SharedFields
from services.api.schema.generation import ABSENT, EMPTY_LIST, OFF, Tokens
from services.api.schema.parse import Body, Harmless, anything, one_of

Content = str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]
INPUT_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Id = Annotated[str, Meta(min_length=1, max_length=128)]
LOGPROBS = "message.output_text.logprobs"  # in `include`, whose other value changes nothing: reasoning is in the clear
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of a conversation; which fields it has is its type's."""

    type: str | None = None  # one of INPUT_ITEMS; None: a message
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    status: str | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # there are none: reasoning is told as it is


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(SharedFields, frozen=True, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None  # true, if not given
    background: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_CALLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Tokens | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None
    user: str | None = None


UNSUPPORTED: dict[str, Harmless] = {
    "conversation": ABSENT,
    "prompt": ABSENT,
    "max_tool_calls": ABSENT,
    "context_management": EMPTY_LIST,
    "moderation": ABSENT,
    "service_tier": one_of("auto", "default"),
    "n": one_of(1),
    "logprobs": OFF,
    # Labels and hints that change nothing in the answer.
    "safety_identifier": anything,
    "prompt_cache_key": anything,
    "prompt_cache_retention": anything,
    "prompt_cache_options": anything,
    "stream_options": anything,  # obfuscation: none is added
    "client_metadata": anything,
}
BODY = Body(ResponsesRequest, UNSUPPORTED)
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "truncate_prompt_tokens": "truncation",
}


def check(asked: ResponsesRequest) -> None:
    """Rules that span fields. Raises Reject."""
    if asked.background and asked.stream:
        raise invalid("background: a response that streams cannot be in the background", "background")
    if asked.background and asked.store is False:
        raise invalid("background: a response in the background must be stored", "background")
    if asked.top_logprobs and not wants_logprobs(asked):
        raise invalid(f"top_logprobs needs include to have {LOGPROBS!r}", "top_logprobs")
    if not asked.input and not (asked.previous_response_id and asked.input is not None):
        raise invalid("input is required: text, or a list of items", "input")


def wants_logprobs(asked: ResponsesRequest) -> bool:
    return LOGPROBS in (asked.include or ())


def input_items(asked: ResponsesRequest) -> list[InputItem]:
    """The input as items. Raises Reject for those that this server does not know."""
    if isinstance(asked.input, str):
        return [InputItem(type="message", role="user", content=[ContentPart("input_text", asked.input)])]
    items = []
    for i, item in enumerate(asked.input or ()):
        kind = item.type or "message"
        if kind not in INPUT_ITEMS:
            raise invalid(f"input[{i}]: items of type {kind!r:.64} are not supported", f"input[{i}].type")
        for name in REQUIRED[kind]:
            if getattr(item, name) is None:
                raise invalid(f"input[{i}].{name} is required", f"input[{i}].{name}")
        items.append(msgspec.structs.replace(item, type=kind))
    return items


REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def converse(asked: ResponsesRequest, earlier: Iterable[InputItem], items: list[InputItem]) -> Conversation:
    """Instructions, what was said before, and the new items."""
    talk = Conversation()
    if asked.instructions:
        talk.say("system", asked.instructions, "instructions")
    for item in earlier:
        add(talk, item, "previous_response_id")
    for i, item in enumerate(items):
        add(talk, item, f"input[{i}]")
    return talk


def add(talk: Conversation, item: InputItem, place: str) -> None:
    """`item` has what its type requires."""
    if item.type == "function_call":
        talk.call(item.call_id or "", item.name or "", item.arguments or "{}", place)
    elif item.type == "function_call_output":
        talk.result(item.call_id or "", _parts(item.output), f"{place}.output")
    elif item.type == "reasoning":
        parts = (item.content if isinstance(item.content, list) else None) or item.summary or []
        if text := "\n".join(part.text or "" for part in parts):
            talk.think(text, place)
    else:
        talk.say(item.role or "user", _parts(item.content), place)


def _parts(content: Content | None) -> Any:
    return content if isinstance(content, str) else msgspec.to_builtins(content or [])


def chat_fields(asked: ResponsesRequest, talk: Conversation) -> dict[str, Any]:
    """The fields of the chat. Raises Reject."""
    fields = asked.as_asked("parallel_tool_calls", "user")
    text = asked.text or TextOptions()
    return fields | {
        "messages": talk.messages,
        "max_completion_tokens": asked.max_output_tokens,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)] if asked.tools else None,
        "tool_choice": _choice(asked.tool_choice),
        "response_format": _format(text.format),
        "verbosity": text.verbosity,
        "logprobs": wants_logprobs(asked),
        "top_logprobs": asked.top_logprobs,
        "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
        "truncate_prompt_tokens": -1 if asked.truncation == "auto" else None,
    }


def _tool(tool: FunctionTool, param: str) -> dict[str, Any]:
    if tool.type != "function":
        raise invalid(f"{param}: tools of type {tool.type!r:.64} are not supported", f"{param}.type")
    if tool.name is None:
        raise invalid(f"{param}.name is required", f"{param}.name")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | ({} if tool.strict is None else {"strict": tool.strict})}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise invalid("text.format.schema is required", "text.format.schema")
    schema = {"name": form.name or "answer", "schema": form.schema, "description": form.description}
    given = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given | ({} if form.strict is None else {"strict": form.strict})}


def not_found(identity: str, param: str = "response_id") -> Reject:
    return Reject(RejectReason.NOT_FOUND, f"there is no response {identity!r:.140}", param)

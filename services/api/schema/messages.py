"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, as the chat that they ask for. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.api.errors import invalid
from services.api.schema.chat import MAX_CALLS, MAX_PARTS, ContentPart, Name
from services.api.schema.conversion import Conversation, SharedFields
from services.api.schema.generation import ABSENT, EMPTY_LIST, MAX_STOPS, StopString, Tokens
from services.api.schema.parse import Body, Harmless, anything, one_of

Texts = str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A block of content; which fields it has is its type's."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None  # of a tool's use
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Texts | None = None  # of a tool's result
    is_error: bool | None = None  # the model reads it from the content


Blocks = str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessageTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None  # "custom", if given
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(SharedFields, frozen=True, kw_only=True):
    """What is sampled, and how, changes no count: a whole request can be counted as it is."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_CALLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None


UNSUPPORTED: dict[str, Harmless] = {
    "container": ABSENT,
    "mcp_servers": EMPTY_LIST,
    "context_management": ABSENT,
    "service_tier": one_of("auto", "standard_only"),
    "speed": one_of("standard"),
    "diagnostics": ABSENT,
    # Labels and hints that change nothing in the answer.
    "metadata": anything,
    "cache_control": anything,
    "inference_geo": anything,
    "user_profile_id": anything,
}
BODY = Body(MessagesRequest, UNSUPPORTED)
COUNT = Body(CountRequest, UNSUPPORTED)
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
KNOWN = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def converse(asked: CountRequest) -> Conversation:
    """System and messages. Raises Reject for blocks that this server does not know."""
    talk = Conversation()
    if asked.system:
        talk.say("system", _texts(asked.system, "system"), "system")
    for i, message in enumerate(asked.messages):
        place = f"messages[{i}]"
        if isinstance(message.content, str):
            talk.say(message.role, message.content, place)
            continue
        texts = []
        for j, block in enumerate(message.content):
            where = f"{place}.content[{j}]"
            check(block, message.role, where)
            if block.type == "text":
                texts.append({"type": "text", "text": block.text})
                continue
            if texts:
                talk.say(message.role, texts, place)
                texts = []
            if block.type == "thinking":
                talk.think(block.thinking or "", where)
            elif block.type == "tool_use":
                talk.call(block.id or "", block.name or "", block.input or {}, where)
            else:
                talk.result(block.tool_use_id or "", _texts(block.content or "", f"{where}.content"), where)
        if texts or not message.content:
            talk.say(message.role, texts, place)
    return talk


def _texts(content: Texts, param: str) -> Any:
    """Content that is only text, as a chat has it."""
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        check(block, "system", f"{param}[{i}]")
    return [{"type": "text", "text": block.text} for block in content]


def check(block: Block | ContentPart, role: str, param: str) -> None:
    """Raises Reject."""
    if block.type not in KNOWN[role]:
        raise invalid(f"{param}: content of type {block.type!r:.64} is not supported here", f"{param}.type")
    for name in REQUIRED[block.type]:
        if getattr(block, name) is None:
            raise invalid(f"{param}.{name} is required", f"{param}.{name}")


def chat_fields(asked: CountRequest, talk: Conversation) -> dict[str, Any]:
    """The fields of the chat. Raises Reject."""
    fields = asked.as_asked("max_tokens")
    choice, config = asked.tool_choice, asked.output_config or OutputConfig()
    if asked.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)]
    if choice is not None:
        fields["tool_choice"] = _choice(choice)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asked.thinking is not None:
        thinks = asked.thinking.type != "disabled"
        switches = {"enable_thinking": thinks, "thinking": thinks}
        fields["chat_template_kwargs"] = switches | (asked.chat_template_kwargs or {})
        fields["thinking_token_budget"] = asked.thinking.budget_tokens if thinks else None
        fields["include_reasoning"] = thinks and asked.thinking.display != "omitted"
    last = talk.messages[-1]
    return fields | {
        "messages": talk.messages,
        # An assistant's last words go on.
        "continue_final_message": (last["role"] == "assistant" and "tool_calls" not in last) or None,
        "stop": getattr(asked, "stop_sequences", None),
        "reasoning_effort": config.effort,
        # The size of the prompt is told before the text.
        "stream_options": {"continuous_usage_stats": True} if fields["stream"] else None,
    }


def _tool(tool: MessageTool, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise invalid(f"{param}: tools of type {tool.type!r:.64} are not supported", f"{param}.type")
    if tool.input_schema is None:
        raise invalid(f"{param}.input_schema is required", f"{param}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": function | ({} if tool.strict is None else {"strict": tool.strict})}


def _choice(choice: MessageToolChoice) -> Any:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name is required", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}

"""The body of /v1/chat/completions, and its messages as the tokenizer's templates take them. Pure."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.constraints import ToolUse
from common.dialects.tools import Tools
from common.logprobs import Report
from common.protocol import ModelFacts, PromptKind, Submit
from common.text_format import ANSWER, AS_IT_IS, GOES_ON, REASONING, TOOLS
from services.api.answer import Wanted
from services.api.errors import invalid
from services.api.schema.beams import searching
from services.api.schema.generation import (
    ABSENT,
    EMPTY_LIST,
    I32_MAX,
    MAX_LOGPROBS,
    OFF,
    UNSUPPORTED,
    GenerationRequest,
    check_common,
    report_of,
    sampling_of,
    submit_fields,
)
from services.api.schema.parse import Body, check_depth, one_of

MAX_PARTS, MAX_CALLS = 4096, 1024  # of one message
Name = Annotated[str, Meta(max_length=1024)]
Role = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.: -]{0,63}\Z")]  # which ones there are the template knows


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: Name
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class Function(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,256}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments match the schema in every point, or the request is refused


class Tool(msgspec.Struct, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """As chats name one, and as responses do."""

    function: NamedFunction | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class NamedChoice(NamedTool, frozen=True, kw_only=True):
    """A tool_choice that is an object; both forms of OpenAI's allowed_tools."""

    type: Literal["function", "allowed_tools"]
    allowed_tools: AllowedTools | None = None
    tools: list[NamedTool] | None = None
    mode: Literal["auto", "required"] = "auto"


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_CALLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=I32_MAX)] | None = None  # -1: no bound
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


UNSUPPORTED_IN_CHAT = UNSUPPORTED | {
    "best_of": one_of(1),
    "functions": EMPTY_LIST,
    "function_call": one_of("none", "auto"),
    "modalities": one_of(["text"]),
    "audio": ABSENT,
    "prediction": ABSENT,
    "web_search_options": ABSENT,
    "verbosity": one_of("medium"),
    "chat_template": ABSENT,
    "add_special_tokens": OFF,
    "documents": EMPTY_LIST,
    "media_io_kwargs": one_of({}),
    "mm_processor_kwargs": one_of({}),
}
BODY = Body(ChatRequest, UNSUPPORTED_IN_CHAT)


class ChatListRequest(ChatRequest, frozen=True, kw_only=True):
    """Many conversations that have all other fields in common."""

    messages: Annotated[list[list[Message]], Meta(min_length=1)]  # type: ignore[assignment]


LIST_BODY = Body(ChatListRequest, UNSUPPORTED_IN_CHAT)


def chats_of(request: ChatListRequest) -> list[ChatRequest]:
    shared = {name: getattr(request, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
    return [ChatRequest(messages=messages, **shared) for messages in request.messages]


def check_messages(messages: list[Message] | None, most: int) -> None:
    """Raises Reject if there are too many: each costs far more than its bytes."""
    if messages and len(messages) > most:
        raise invalid(f"{len(messages)} messages are more than the {most} allowed", "messages")


def messages_json(messages: list[Message]) -> bytes:
    """Checked messages as JSON: content is one string, arguments of calls are objects. Raises Reject."""
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    return msgspec.json.encode([_plain(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _plain(message: Message, param: str) -> dict[str, Any]:
    if message.function_call is not None:
        raise invalid(
            f"{param}.function_call is not supported by this server; use tool_calls", f"{param}.function_call"
        )
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise invalid(f"{param}.tool_calls: only an assistant calls tools", f"{param}.tool_calls")
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if message.content is None and not calls and reasoning is None:
        raise invalid(f"{param}.content is required", f"{param}.content")
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content, f"{param}.content")}
    if calls:
        plain["tool_calls"] = [_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    if reasoning is not None:  # the names that templates have for it
        optional |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if not (calls and plain["content"]):  # templates that know this one take either of the two
            optional["thinking"] = reasoning
    return plain | {key: value for key, value in optional.items() if value is not None}


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    """Templates add strings: parts are joined by line ends, and no content is an empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(f"{param}[{i}]: content of type {part.type!r:.64} is not supported", f"{param}[{i}].type")
        if part.text is None:
            raise invalid(f"{param}[{i}].text is required", f"{param}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: ToolCall, param: str) -> dict[str, Any]:
    """Arguments stay the text that they are: templates get both that and the object in it."""
    written = call.function.arguments or "{}"
    where = f"{param}.function.arguments"
    if isinstance(written, dict):
        arguments, written = written, json.dumps(written, ensure_ascii=False)
    else:
        try:
            arguments = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{where} is no JSON object: {error}", where) from error
    check_depth(arguments, where)
    function = {"name": call.function.name, "arguments": written}
    return {"id": call.id or "", "type": call.type, "function": function}


def tools_of(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of, as templates take them. Raises Reject."""
    for i, tool in enumerate(request.tools or ()):
        check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
    if request.tool_choice == "none":
        return []
    functions = (
        {"name": tool.function.name, "description": tool.function.description or ""}
        | ({"parameters": tool.function.parameters} if tool.function.parameters is not None else {})
        for tool in request.tools or ()
    )
    return [{"type": "function", "function": function} for function in functions]


def use_of(request: ChatRequest, tools: list[dict[str, Any]], bound: bool) -> ToolUse | None:
    """What is enforced of calls; None: nothing. bound: the rest of the answer must match something. Raises Reject."""
    choice, known = request.tool_choice, [tool["function"]["name"] for tool in tools]
    names, must, many = _chosen(choice, known) if choice not in (None, "auto", "none") else (known, False, True)
    if must and not names:
        raise invalid("tool_choice asks for a call, but there are no tools", "tool_choice")
    strict = tuple(tool.function.name for tool in request.tools or () if tool.function.strict)
    many = many and request.parallel_tool_calls is not False
    if not names or not (must or strict or bound or not many or len(names) < len(known)):
        return None
    return ToolUse(tuple(names), strict, must, many)


def _chosen(choice: str | dict[str, Any] | None, known: list[str]) -> tuple[list[str], bool, bool]:
    """Names that may be called, whether one must, and whether more than one call may be."""
    if choice == "required":
        return known, True, True
    try:
        asked = msgspec.convert(choice, NamedChoice)
    except msgspec.ValidationError as error:
        told = f"tool_choice {msgspec.json.encode(choice).decode():.200} is not known"
        raise invalid(f"{told}: use none, auto, required, or an object that names a function", "tool_choice") from error
    if asked.type == "function":
        names, must = [asked.name or (asked.function.name if asked.function else "")], True
    else:
        allowed = asked.allowed_tools or AllowedTools(asked.tools or [], asked.mode)
        names = [each.name or (each.function.name if each.function else "") for each in allowed.tools]
        must = allowed.mode == "required"
    for name in names:
        if name not in known:
            raise invalid(f"tool_choice names {name!r:.100}, which is none of the tools", "tool_choice")
    return list(dict.fromkeys(names)), must, asked.type != "function"


def template_kwargs(request: ChatRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template gets besides the messages; `chat_template_kwargs` has the last word. Raises Reject."""
    found: dict[str, Any] = {"tools": tools} if tools else {}
    if effort := request.reasoning_effort:
        thinks = effort != "none"
        found |= {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            found["reasoning_effort"] = effort
    given = request.chat_template_kwargs or {}
    check_depth(given, "chat_template_kwargs")
    if "tools" in given:
        raise invalid("chat_template_kwargs.tools: use the field tools", "chat_template_kwargs")
    return found | given


def prompt_end(request: ChatRequest) -> int:
    """Where the rendered chat ends. Raises Reject."""
    if not request.continue_final_message:
        return AS_IT_IS if request.add_generation_prompt is False else ANSWER
    if request.add_generation_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other", "continue_final_message")
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        raise invalid("the last message must be an assistant's, with content", "continue_final_message")
    return GOES_ON


def echo_of(request: ChatRequest) -> str:
    """What stands before the answer: the last message, if it is the assistant's."""
    last = request.messages[-1] if request.echo and request.messages else None
    return _text(last.content, "messages") if last is not None and last.role == "assistant" else ""


def wanted_of(request: ChatRequest) -> Wanted:
    """How the answers are to be told."""
    tools = tools_of(request)
    return Wanted(
        Tools(tools) if tools else None,
        request.include_reasoning is not False,
        request.parallel_tool_calls is not False,
    )


def report_in_chat(request: ChatRequest, facts: ModelFacts, most: int) -> Report:
    """Raises Reject."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    top = (request.top_logprobs or 0) if request.logprobs else None
    return report_of(request, facts, top, most, "top_logprobs")


def submits_of(
    request: ChatRequest, facts: ModelFacts, max_choices: int, max_logprobs: int = MAX_LOGPROBS
) -> list[Submit]:
    """The one Submit of a chat request; without max_tokens the context is the limit. Raises Reject."""
    check_common(request, facts, request.n or 1, max_choices)
    tools = tools_of(request)
    sampling = sampling_of(request, facts, 0, report_in_chat(request, facts, max_logprobs))
    fields = submit_fields(request, prompt_end(request))
    if request.thinking_token_budget == 0:
        text = "thinking_token_budget is 0: reasoning_effort none, or chat_template_kwargs, ask for none at all"
        raise invalid(text, "thinking_token_budget")
    if request.thinking_token_budget is not None and request.thinking_token_budget > 0:
        bound = request.thinking_token_budget
        fields["options"] = msgspec.structs.replace(fields["options"], thinking_tokens=bound)
    if use := use_of(request, tools, sampling.grammar is not None):
        fields["options"] = msgspec.structs.replace(fields["options"], calls=use)
    submit = Submit(
        seq_id=0,
        kind=PromptKind.CHAT,
        sampling=sampling,
        messages=messages_json(request.messages),
        template_kwargs=msgspec.json.encode(template_kwargs(request, tools)),
        parts=REASONING | TOOLS if tools else REASONING,
        **fields,
    )
    return [searching(request, submit)]

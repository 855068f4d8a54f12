"""Renders OpenAI-style messages with a model's chat template, in a sandbox, as transformers does.

Pure apart from the clock that a template may ask for. Whatever a template or a message does wrong is a Reject.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import Reject, RejectReason

PARAM = "messages"
RESERVED = ("messages",)
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the code that jinja2 makes
    TypeError,
    ValueError,
)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering only needs what is inside."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes characters of HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class Arguments(dict[str, Any]):
    """Arguments of a call: an object, and for templates that print or join it the very text that it was."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class ChatTemplate:
    """A compiled template with the model's special tokens. `tool_source` is used when a request has tools."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str = "") -> None:
        """Raises Reject (INVALID) for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except TEMPLATE_FAULTS as error:
            raise Reject(
                RejectReason.INVALID, f"the model's chat template cannot be compiled: {error}", PARAM
            ) from error

    def render(self, messages: bytes, template_kwargs: bytes, add_generation_prompt: bool, max_chars: int) -> str:
        """The prompt. `messages` is a JSON list, `template_kwargs` a JSON object or empty. Raises Reject."""
        variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables |= self._special_tokens | _kwargs(template_kwargs)
        variables["messages"] = [_plain(message) for message in _messages(messages)]
        template = self._tool_template if variables["tools"] else self._template
        parts: list[str] = []
        chars = 0
        try:
            for part in template.generate(variables):
                chars += len(part)
                if chars > max_chars:
                    text = f"the rendered messages are longer than {max_chars} characters"
                    raise Reject(RejectReason.TOO_LONG, text, PARAM)
                parts.append(part)
        except TEMPLATE_FAULTS as error:
            reason = getattr(error, "message", None) or str(error) or type(error).__name__
            text = f"the model's chat template refuses these messages: {reason}"
            raise Reject(RejectReason.INVALID, text, PARAM) from error
        return "".join(parts)


def _messages(encoded: bytes) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(encoded, type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise Reject(RejectReason.INVALID, f"the messages are not a list of objects: {error}", PARAM) from error


def _kwargs(encoded: bytes) -> dict[str, Any]:
    if not encoded:
        return {}
    try:
        found = msgspec.json.decode(encoded, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"the template arguments are not an object: {error}"
        raise Reject(RejectReason.INVALID, text, "chat_template_kwargs") from error
    for name in RESERVED:
        if name in found:
            raise Reject(RejectReason.INVALID, f"{name} cannot be a template argument", "chat_template_kwargs")
    return found


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content a string, arguments of tool calls an object."""
    plain = dict(message)
    content = plain.get("content")
    plain["content"] = _joined(content) if isinstance(content, list) else "" if content is None else content
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _joined(parts: list[Any]) -> str:
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Reject(RejectReason.INVALID, 'this model only takes content parts of type "text"', PARAM)
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """OpenAI's clients send arguments as JSON text; templates take them as an object, or as text."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        decoded = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return call  # shown to the model as it is
    return call | {"function": function | {"arguments": Arguments(decoded, arguments)}}

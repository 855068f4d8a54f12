"""Conversations of other APIs as chat requests: one struct, one set of rules, whoever asked. Pure.

A refusal names the field of the API that was used: `Conversation.places` says where each part of the chat came from.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import Reject
from services.api.schema.chat import BODY, ChatRequest
from services.api.schema.generation import Milliseconds


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of other APIs have under a chat's own name. The chat checks what has no limits here."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # Of ours, which those APIs do not have.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    deadline_ms: Milliseconds | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_asked(self, *more: str) -> dict[str, Any]:
        """These fields and those named `more`, for the chat; None stands for what is not given, or not known here."""
        return {name: getattr(self, name, None) for name in (*SharedFields.__struct_fields__, *more)}


class Conversation:
    """Messages of a chat, turn by turn. What an assistant thinks, says and calls in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}  # "messages[3].content" -> "input[2].content"

    def say(self, role: str, content: Any, place: str) -> None:
        """`content`: text, or parts as a chat has them."""
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})
        self._note("", place)
        self._note(".content", f"{place}.content")

    def think(self, text: str, place: str) -> None:
        self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        self._note(".reasoning_content", place)

    def call(self, identity: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        calls = self._assistant().setdefault("tool_calls", [])
        self._note(f".tool_calls[{len(calls)}].function", place)
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, identity: str, content: Any, place: str) -> None:
        """Of a call."""
        self.messages.append({"role": "tool", "tool_call_id": identity, "content": content})
        self._note("", place)

    def _assistant(self, *full: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one where that has any of the keys `full`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(key in last for key in full):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last

    def _note(self, part: str, place: str) -> None:
        self.places[f"messages[{len(self.messages) - 1}]{part}"] = place


def chat_of(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat that these fields ask for; None stands for what is not given. Raises Reject."""
    return BODY.parse(msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a Reject that names a field of the chat is raised with the name that its client knows."""
    try:
        yield
    except Reject as reject:
        param = reject.param or ""
        found = max((name for name in names if _begins(param, name)), key=len, default=None)
        if found is None:
            raise
        known = names[found] + param[len(found) :]
        raise Reject(reject.reason, reject.message.replace(param, known), known) from reject


def _begins(param: str, name: str) -> bool:
    return param.startswith(name) and param[len(name) :][:1] in ("", ".", "[")

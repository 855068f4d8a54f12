"""A message of /v1/messages as it grows: its object, and the events that tell it in Anthropic's order. Pure.

One per message; `typed_events` feeds it. Blocks are told one after another: one is open at most.
"""

from typing import Any

import msgspec

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from common.errors import Reject
from common.protocol import FinishReason
from services.api.errors import anthropic_error, of_reject
from services.api.hub import Choice
from services.api.schema.message_object import (
    ContentBlock,
    MessageObject,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    usage_of,
)
from services.api.schema.replies import Usage
from services.api.typed_events import Told

SIGNATURE = "unsigned"  # clients want one; nobody checks it
STOPS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = {"type": "ping"}


class MessageEvents:
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, message: MessageObject) -> None:
        self.body = message
        self._open: ContentBlock | None = None  # the newest block, while it grows
        self._pieces: list[str] = []  # of its text
        self._failure: Reject | None = None

    def begin(self, usage: Usage) -> Told:
        self.body.usage = usage_of(usage)
        return [{"type": "message_start", "message": msgspec.to_builtins(self.body)}]

    def feed(self, events: list[Event]) -> Told:
        told: Told = []
        for event in events:
            if isinstance(event, CallBegun):
                told += self._start(ToolUseBlock(event.identity, event.name))
            elif isinstance(event, Arguments):
                told.append(self._grow("input_json_delta", "partial_json", event.text))
            elif isinstance(event, Reasoning):
                told += self._text(ThinkingBlock(), "thinking", event)
            else:
                told += self._text(TextBlock(), "text", event)
        return told

    def end(self, choice: Choice, usage: Usage, failure: Reject | None) -> Told:
        self._failure = failure
        if failure is not None:
            return []  # the error is all that follows
        finished, message = choice.finished, self.body
        assert finished is not None
        told = [] if message.content else self._text(TextBlock(), "text", Content(""))
        told += self._close()
        message.usage = usage_of(usage)
        message.stop_reason = STOPS[choice.word]
        if finished.reason is FinishReason.STOP_STRING and message.stop_reason == "end_turn":
            message.stop_reason, message.stop_sequence = "stop_sequence", finished.stop_string
        return told

    def conclude(self) -> Told:
        if self._failure is not None:
            return [msgspec.to_builtins(anthropic_error(*of_reject(self._failure)))]
        message = self.body
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        usage = msgspec.to_builtins(message.usage)
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _text(self, block: TextBlock | ThinkingBlock, name: str, event: Content | Reasoning) -> Told:
        told: Told = []
        if type(self._open) is not type(block):
            told += self._start(block)
        if event.text:
            told.append(self._grow(f"{name}_delta", name, event.text))
        return told

    def _start(self, block: ContentBlock) -> Told:
        told = self._close()
        self._open, self._pieces = block, []
        self.body.content.append(block)
        told.append(self._event("content_block_start", content_block=msgspec.to_builtins(block)))
        return told if len(self.body.content) > 1 else [*told, PING]

    def _grow(self, kind: str, name: str, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _close(self) -> Told:
        block, text, told = self._open, "".join(self._pieces), []
        if block is None:
            return []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking, block.signature = text, SIGNATURE
            told.append(self._event("content_block_delta", delta={"type": "signature_delta", "signature": SIGNATURE}))
        else:
            block.input = input_of(text)
        self._open = None
        return [*told, self._event("content_block_stop")]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.body.content) - 1, **fields}


def input_of(arguments: str) -> dict[str, Any]:
    """Arguments as the object that a block must have; what is none, since it broke off, is shown as it is."""
    if not arguments:
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"invalid_json": arguments}

"""The message that /v1/messages answers with, and its blocks. Values only."""

from typing import Any, Literal

import msgspec

from services.api.schema.replies import Usage


class TextBlock(msgspec.Struct, tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True):
    """Anthropic counts prompt tokens that were cached apart from the others."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = MessageUsage()


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


def usage_of(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    thought = OutputDetails(usage.completion_tokens_details.reasoning_tokens)
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, 0, cached, thought)

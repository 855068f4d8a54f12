"""The order of events that Anthropic's API has, and that they add up to the whole message."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from common.errors import Reject, RejectReason
from common.protocol import FinishReason, TextFormat
from services.api.answer import Wanted
from services.api.hub import Choice
from services.api.message_events import MessageEvents
from services.api.schema.message_object import MessageObject
from tests.services.api.test_response_events import ALL, USAGE, ended


def told(events: list[Event], choice: Choice | None = None, failure: Reject | None = None) -> tuple[Any, list[Any]]:
    """The final object, and all events as a client sees them, each encoded when it is told."""
    telling = MessageEvents(MessageObject(id="msg_1", model="tiny"))
    found = telling.begin(USAGE)
    for event in events:
        found += telling.feed([event])
    found += telling.end(choice or ended(), USAGE, failure)
    found += telling.conclude()
    return msgspec.to_builtins(telling.body), msgspec.json.decode(msgspec.json.encode(found))


def test_the_order_of_a_message_with_everything() -> None:
    body, events = told(ALL)
    shown = [
        event["type"] + (f".{event['delta']['type']}" if "type" in event.get("delta", {}) else "") for event in events
    ]
    delta = "content_block_delta"
    assert shown == [
        *("message_start", "content_block_start", "ping"),
        *(f"{delta}.thinking_delta", f"{delta}.thinking_delta", f"{delta}.signature_delta", "content_block_stop"),
        *("content_block_start", f"{delta}.text_delta", f"{delta}.text_delta", "content_block_stop"),
        *("content_block_start", f"{delta}.input_json_delta", f"{delta}.input_json_delta", "content_block_stop"),
        *("content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == 3
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][2]["input"] == {"x": 1} and body["content"][3]["input"] == {}
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["cache_read_input_tokens"]) == (3, 5, 4)
    assert events[-2]["usage"] == usage and usage["output_tokens_details"] == {"thinking_tokens": 2}


def called(reason: FinishReason) -> Choice:
    choice = ended(reason)
    choice.request.wanted = Wanted()
    choice.read_as(TextFormat(1, "hermes"))
    assert choice.answer is not None
    choice.answer.calls = 1
    return choice


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (ended(), "end_turn"),
        (ended(FinishReason.LENGTH), "max_tokens"),
        (called(FinishReason.EOS), "tool_use"),
        (called(FinishReason.LENGTH), "max_tokens"),
        (ended(FinishReason.STOP_TOKEN), "end_turn"),
    ],
)
def test_why_it_ended(choice: Choice, reason: str) -> None:
    body, events = told([Content("a")], choice)
    assert body["stop_reason"] == events[-2]["delta"]["stop_reason"] == reason and body["stop_sequence"] is None


def test_a_stop_sequence_is_named() -> None:
    choice = ended(FinishReason.STOP_STRING)
    assert choice.finished is not None
    choice.finished = msgspec.structs.replace(choice.finished, stop_string="END")
    body, events = told([Content("a")], choice)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_failure_is_one_error_and_nothing_more() -> None:
    _, events = told([Content("a")], ended(FinishReason.ERROR), Reject(RejectReason.UNAVAILABLE, "gone"))
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "gone"}


def test_arguments_that_broke_off_are_shown() -> None:
    broken = [CallBegun(0, "f", "c"), Arguments(0, '{"a": "b')]
    assert told(broken)[0]["content"][0]["input"] == {"invalid_json": '{"a": "b'}


@given(st.lists(st.sampled_from([Content("a"), Content("ü"), Reasoning("r"), CallBegun(0, "f", "c")]), max_size=9))
def test_blocks_open_and_close_once_and_deltas_are_the_text(events: list[Event]) -> None:
    body, stream = told(events)
    opened, texts = -1, [""] * len(body["content"])
    for event in stream:
        if event["type"] == "content_block_start":
            assert event["index"] == opened + 1
            opened += 1
        if event["type"] == "content_block_delta":
            assert event["index"] == opened
            texts[opened] += event["delta"].get("text", "") + event["delta"].get("thinking", "")
    assert texts == [block.get("text", block.get("thinking", "")) for block in body["content"]]
    kinds = [event["type"] for event in stream]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(body["content"]) > 0

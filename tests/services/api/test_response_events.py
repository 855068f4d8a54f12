"""The order of events that OpenAI's API has, and that they add up to the whole reply."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from common.errors import Reject, RejectReason
from common.protocol import FinishReason, PromptKind, Sampling, Submit, TextFinished
from services.api.hub import Choice, Request
from services.api.response_events import ResponseEvents
from services.api.schema.logprobs import ChatLogprobs, ContentLogprob
from services.api.schema.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from services.api.schema.response_object import ResponseObject

USAGE = Usage(7, 5, 12, PromptTokensDetails(4), CompletionTokensDetails(2))
ALL: list[Event] = [
    Reasoning("why"),
    Reasoning(" not"),
    Content("a"),
    Content("b"),
    CallBegun(0, "f", "call_1"),
    Arguments(0, '{"x":'),
    Arguments(0, " 1}"),
    CallBegun(1, "g", "call_2"),
]


def ended(reason: FinishReason = FinishReason.EOS) -> Choice:
    choice = Choice(Request(0.0, 0), 1, 1, 9, Submit(1, PromptKind.TEXT, Sampling(9)))
    choice.finished = TextFinished(1, reason, 7, 5)
    return choice


def told(events: list[Event], reason: FinishReason = FinishReason.EOS, failed: bool = False) -> tuple[Any, list[Any]]:
    """The final object, and all events as a client sees them, each encoded when it is told."""
    telling = ResponseEvents(ResponseObject(id="resp_1", created_at=1, model="tiny"))
    found = telling.begin(USAGE)
    for event in events:
        found += telling.feed([event])
    found += telling.end(ended(reason), USAGE, Reject(RejectReason.INTERNAL, "broken") if failed else None)
    found += telling.conclude()
    return msgspec.to_builtins(telling.body), msgspec.json.decode(msgspec.json.encode(found))


def test_the_order_of_a_reply_with_everything() -> None:
    body, events = told(ALL)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == body and body["status"] == "completed" and body["completed_at"]
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert body["output"][2]["arguments"] == '{"x": 1}' and body["output"][1]["content"][0]["text"] == "ab"
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2


def test_an_event_shows_what_was_there_when_it_was_told() -> None:
    _, events = told(ALL)
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" for item in added)
    assert added[0]["content"] == added[1]["content"] == [] and added[2]["arguments"] == ""


@pytest.mark.parametrize(
    ("reason", "failed", "status"),
    [
        (FinishReason.EOS, False, "completed"),
        (FinishReason.STOP_STRING, False, "completed"),
        (FinishReason.LENGTH, False, "incomplete"),
        (FinishReason.ERROR, True, "failed"),
    ],
)
def test_one_terminal_that_says_how_it_ended(reason: FinishReason, failed: bool, status: str) -> None:
    body, events = told([Content("a")], reason, failed)
    terminal = [event["type"] for event in events if event["type"].count(".") == 1][2:]
    assert terminal == [f"response.{status}"] and body["status"] == status
    assert (body["error"] is not None) == failed
    assert (body["incomplete_details"] == {"reason": "max_output_tokens"}) == (status == "incomplete")
    assert body["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")


def test_nothing_said_is_an_empty_message_and_a_failure_none() -> None:
    assert told([])[0]["output"][0]["content"][0]["text"] == ""
    assert told([], FinishReason.ERROR, failed=True)[0]["output"] == []


@pytest.mark.parametrize("streamed", [True, False])
def test_a_message_has_the_log_probabilities_of_its_own_tokens(streamed: bool) -> None:
    pieces = ["<t>", "why", "</t>", "a", "b", "<call>", "f", "x", "</s>"]
    tokens = [ContentLogprob(piece, -0.5, list(piece.encode()), []) for piece in pieces]
    events = [(Reasoning("why"), 3), (Content("a"), 1), (Content("b"), 2), (CallBegun(0, "f", "c"), 1)]
    come: list[ContentLogprob] = []

    def reports() -> ChatLogprobs | None:
        news, come[:] = come[:], []
        return ChatLogprobs(news) if news else None

    telling = ResponseEvents(ResponseObject(id="resp_1", created_at=1, model="tiny"), reports)
    told, at = telling.begin(USAGE), 0
    if not streamed:
        come += tokens
    for event, count in events:
        if streamed:
            come += tokens[at : at + count]
        at += count
        told += telling.feed([event])
    if streamed:
        come += tokens[at:]
    told += telling.end(ended(), USAGE, None)
    message = msgspec.to_builtins(telling.body)["output"][1]
    wanted = msgspec.to_builtins(tokens[3:5])
    assert message["content"][0]["logprobs"] == wanted
    assert [event["logprobs"] for event in told if event["type"] == "response.output_text.done"] == [wanted]
    if streamed:
        deltas = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
        assert deltas == [wanted[:1], wanted[1:]], "each with its text"


@given(
    st.lists(st.sampled_from([Content("a"), Content("ü"), Reasoning("r"), CallBegun(0, "f", "c"), None]), max_size=9)
)
def test_items_open_and_close_once_and_deltas_are_the_text(pieces: list[Event | None]) -> None:
    calls, events = 0, list[Event]()
    for piece in pieces:
        if isinstance(piece, CallBegun):
            events += [piece._replace(call=calls), Arguments(calls, "{"), Arguments(calls, "}")]
            calls += 1
        elif piece is not None:
            events.append(piece)
    body, stream = told(events)
    kinds = Counter(event["type"] for event in stream)
    assert kinds["response.output_item.added"] == kinds["response.output_item.done"] == len(body["output"])
    opened: int | None = None
    texts = dict.fromkeys(range(len(body["output"])), "")
    for event in stream[2:-1]:
        if event["type"] == "response.output_item.added":
            assert opened is None
            opened = event["output_index"]
        assert event["output_index"] == opened
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
        if event["type"] == "response.output_item.done":
            assert event["item"] == body["output"][event["output_index"]]
            opened = None
    said = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in body["output"]]
    assert list(texts.values()) == said

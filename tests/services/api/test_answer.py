import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.dialects.events import Arguments, CallBegun
from common.protocol import FinishReason, Peer, PromptKind, Sampling, Submit, TextFinished, TextFormat
from services.api.answer import Answer, Wanted
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.schema.replies import message_of
from services.api.sse import Chunks
from tests.common.dialects.reading import ASKED, EXAMPLES
from tests.services.api.system import rows

THOUGHT = "<think>Why?</think>"


def ids(dialect: str, text: str) -> list[str]:
    answer = Answer(TextFormat(1, dialect), Wanted(ASKED))
    return [event.identity for event in answer.feed(text) + answer.finish() if isinstance(event, CallBegun)]


def test_ids_of_calls() -> None:
    first, second = ids("hermes", EXAMPLES["hermes"])
    assert first != second and first.startswith("call_")
    assert all(len(each) == 9 and each.isalnum() for each in ids("mistral", EXAMPLES["mistral"]))
    assert ids("kimi_k2", EXAMPLES["kimi_k2"]) == ["functions.get_weather:0", "functions.time.now:1"]


def test_the_end_comes_once() -> None:
    answer = Answer(TextFormat(1, "hermes"), Wanted(ASKED))
    assert answer.feed("<tool") == [] and answer.feed("") == []
    assert len(answer.finish()) == 1 and answer.finish() == []


def test_one_call_is_enough() -> None:
    answer = Answer(TextFormat(1, "hermes"), Wanted(ASKED, parallel=False))
    events = answer.feed(EXAMPLES["hermes"]) + answer.finish()
    assert {event.call for event in events if isinstance(event, CallBegun | Arguments)} == {0} and answer.calls == 1


def test_an_unknown_dialect_is_plain_text() -> None:
    """Of a tokenizer that is newer."""
    answer = Answer(TextFormat(1, "later", "later"), Wanted(ASKED))
    assert "".join(event.text for event in answer.feed(EXAMPLES["hermes"]) if hasattr(event, "text"))


def open_request(wanted: Wanted) -> tuple[Hub, Request]:
    hub = Hub(Routes(0, 1), 100, lambda peer, message: True, Figures(), 30.0)
    request = hub.open([Submit(0, PromptKind.CHAT, Sampling(16), n=2)], [Peer("tokenizer", 0, 9, "")], 0.0, 100)
    request.wanted = wanted
    return hub, request


def told(request: Request, dialect: str) -> Any:
    return msgspec.structs.replace(rows(), formats=[TextFormat(request.choices[0].seq_id, dialect, "think")])


def gathered(chunks: list[bytes]) -> dict[str, Any]:
    """One choice of a stream, put together as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in b"".join(chunks).split(b"\n\n")[:-1]:
        delta = json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                found["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            found["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return found


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_stream_says_what_a_whole_reply_says(data: st.DataObject) -> None:
    dialect = data.draw(st.sampled_from(sorted(EXAMPLES)))
    wanted = Wanted(data.draw(st.sampled_from([ASKED, None])), data.draw(st.booleans()), data.draw(st.booleans()))
    text = data.draw(st.sampled_from(["", THOUGHT])) + EXAMPLES[dialect]
    text = text[: data.draw(st.integers(0, len(text)))]
    hub, request = open_request(wanted)
    hub.feed(told(request, dialect), 1.0)
    streamed, whole = request.choices
    chunks, written = Chunks("chat", "x", 1, "m", False), []
    begin = index = 0
    while begin < len(text):
        end = data.draw(st.integers(begin + 1, len(text)))
        batch = [(choice.seq_id, index, 1, text[begin:end]) for choice in (streamed, whole)]
        hub.feed(rows(*batch), 1.0)
        written += chunks.events(0, streamed.read())
        begin, index = end, index + 1
    ends = tuple(TextFinished(choice.seq_id, FinishReason.EOS, 3, index) for choice in (streamed, whole))
    hub.feed(rows(finished=ends), 1.0)
    written += chunks.events(0, streamed.read())
    message = json.loads(msgspec.json.encode(message_of(whole)))
    calls = [each["function"] for each in message.get("tool_calls", [])]
    assert gathered(written) == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
    }
    assert streamed.word == whole.word == ("tool_calls" if calls else "stop")

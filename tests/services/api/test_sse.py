import asyncio
import json
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, pack_u64
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    FinishReason,
    Options,
    Pause,
    Peer,
    PromptKind,
    Sampling,
    Submit,
    TextFinished,
    TextFormat,
)
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.schema.replies import PromptTokensDetails, Usage
from services.api.sse import DONE, KEEP_ALIVE, Chunks, EventStream
from tests.services.api.system import rows, scenario


class FakeWire:
    """A client that reads while `writable`."""

    def __init__(self) -> None:
        self.writable = True
        self.written: list[bytes] = []
        self.aborted = False
        self.on_writable: Any = None
        self.on_lost: Any = None

    def write_chunk(self, body: bytes) -> bool:
        assert self.writable and body
        self.written.append(body)
        return self.writable

    def watch(self, on_lost: Any) -> None:
        self.on_lost = on_lost

    def abort(self) -> None:
        self.aborted = True

    async def send(self, message: Any) -> None:
        while not self.writable:
            await asyncio.sleep(0.001)
        if message["type"] == "http.response.body" and message["body"]:
            self.written.append(message["body"])


class Rig:
    def __init__(
        self, kind: str = "chat", n: int = 1, limit: int = 100, include_usage: bool = False, slow_s: float = 30.0
    ) -> None:
        self.sent: list[Any] = []
        self.hub = Hub(Routes(0, 1), 100, lambda peer, message: self.sent.append(message) or True, Figures(), 30.0)
        submit = Submit(0, PromptKind.TEXT, Sampling(16), n=n)
        self.request: Request = self.hub.open([submit], [Peer("tokenizer", 0, 9, "")], 0.0, limit)
        self.wire = FakeWire()
        chunks = Chunks(kind, 'id"x', 5, "tiny", include_usage)
        self.stream = EventStream(
            self.request,
            self.hub,
            chunks,
            self.wire,  # type: ignore[arg-type]
            include_usage,
            None,
            slow_s,
        )
        self.ids = [choice.seq_id for choice in self.request.choices]

    def feed(self, *items: tuple[int, int, str]) -> None:
        self.hub.feed(rows(*((self.ids[i], first, 1, text) for i, first, text in items)), 1.0)
        self.hub.flush()

    def end(self, index: int, reason: FinishReason = FinishReason.EOS, **more: Any) -> None:
        self.hub.feed(rows(finished=(TextFinished(self.ids[index], reason, 3, 2, **more),)), 1.0)
        self.hub.flush()

    def start(self) -> "asyncio.Task[None]":
        async def receive() -> Any:
            raise AssertionError

        return asyncio.create_task(self.stream({}, receive, self.wire.send))

    @property
    def text(self) -> bytes:
        return b"".join(self.wire.written)


def events(text: bytes) -> list[Any]:
    """The payloads; checks the framing of each event."""
    assert text.endswith(b"\n\n")
    payloads = [block for block in text[:-2].split(b"\n\n") if not block.startswith(b":")]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in payloads)
    return [json.loads(block[6:]) if block != DONE[:-2] else "[DONE]" for block in payloads]


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("text", ["a", 'q"\\\n\t', "ü€😀", "\x00\x1f\u2028", "</script>"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_text_chunks_are_json(kind: str, text: str) -> None:
    before, after = Chunks(kind, 'id"x', 5, "m", False).text(3)
    (chunk,) = events(before + json.dumps(text).encode() + after)
    (choice,) = chunk["choices"]
    assert (chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) == ('id"x', 5, "m", None)
    assert choice["index"] == 3 and choice["finish_reason"] is None
    if kind == "chat":
        assert chunk["object"] == "chat.completion.chunk" and choice["delta"] == {"content": text}
    else:
        assert chunk["object"] == "text_completion" and choice["text"] == text


def test_the_usage_chunk_has_no_choices() -> None:
    (chunk,) = events(Chunks("chat", "x", 5, "m", True).usage(Usage(3, 4, 7, PromptTokensDetails(2))))
    assert chunk["choices"] == [] and chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stream_from_role_to_done() -> None:
    async def main() -> None:
        rig = Rig(n=2, include_usage=True)
        assert not rig.stream.opened.done()
        rig.feed((0, 0, "a"))
        assert rig.stream.opened.done() and not rig.wire.written
        task = rig.start()
        await turn()
        rig.feed((0, 1, "b"), (1, 0, "x"))
        rig.end(0)
        rig.end(1, FinishReason.STOP_STRING, stop_string="S")
        await task
        found = events(rig.text)
        assert found[-1] == "[DONE]" and found[-2]["usage"]["completion_tokens"] == 4 and found[-2]["choices"] == []
        assert all(chunk["usage"] is None for chunk in found[:-2])
        choices = [chunk["choices"][0] for chunk in found[:-2]]
        assert [c["delta"].get("role") for c in choices[:2]] == ["assistant"] * 2
        said = {i: "".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in (0, 1)}
        assert said == {0: "ab", 1: "x"}
        ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]}
        assert ends == {0: ("stop", None), 1: ("stop", "S")}

    scenario(main)


def test_tokens_that_wait_share_an_event_and_choices_share_a_write() -> None:
    async def main() -> None:
        rig = Rig("completion", n=2)
        task = rig.start()
        await turn()
        for index in range(3):
            rig.hub.feed(rows((rig.ids[0], index, 1, "a"), (rig.ids[1], index, 1, "b")), 1.0)
        rig.hub.flush()
        assert len(rig.wire.written) == 1
        assert [chunk["choices"][0]["text"] for chunk in events(rig.text)] == ["aaa", "bbb"]
        rig.end(0)
        rig.end(1)
        await task

    scenario(main)


def test_nothing_is_written_while_the_client_does_not_read() -> None:
    async def main() -> None:
        rig = Rig("completion")
        task = rig.start()
        await turn()
        rig.wire.writable = False
        rig.feed((0, 0, "a"))
        rig.feed((0, 1, "b"))
        rig.stream.keep_alive()
        assert not rig.wire.written
        rig.wire.writable = True
        rig.wire.on_writable()
        assert [chunk["choices"][0]["text"] for chunk in events(rig.text)] == ["ab"]
        rig.wire.writable = False
        rig.end(0)
        await turn()
        assert not task.done()
        rig.wire.writable = True
        rig.wire.on_writable()
        await task
        assert rig.text.endswith(DONE)

    scenario(main)


def test_a_client_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rig = Rig(limit=2)
        task = rig.start()
        await turn()
        rig.wire.writable = False
        for index in range(5):
            rig.feed((0, index, "a"))
        await task
        assert rig.wire.aborted and not rig.hub.choices

    monkeypatch.setattr("services.api.sse.LAST_WRITE_S", 0.01)
    scenario(main)


def test_a_client_that_takes_nothing_for_long_is_given_up() -> None:
    async def main() -> None:
        rig = Rig(limit=100, slow_s=0.01)
        rig.feed((0, 0, "a"))
        task = rig.start()
        await turn()
        rig.wire.writable = False
        rig.feed((0, 1, "b"))
        while rig.request.failure is None:
            await asyncio.sleep(0.001)
        assert rig.request.failure.reason is RejectReason.DEADLINE and rig.hub.figures.slow_clients == 1
        assert rig.sent[-1] == Abort(rig.ids[0])
        rig.wire.writable = True
        await task
        assert events(rig.text)[-1]["error"]["code"] == "deadline_exceeded"

    scenario(main)


def test_a_client_that_reads_in_time_is_not() -> None:
    async def main() -> None:
        rig = Rig(limit=1, slow_s=30.0)
        rig.feed((0, 0, "a"))
        task = rig.start()
        await turn()
        rig.wire.writable = False
        rig.feed((0, 1, "b"))
        rig.feed((0, 2, "c"))
        assert rig.request.paused and rig.sent[-1] == Pause(rig.ids[0], True)
        rig.wire.writable = True
        rig.wire.on_writable()
        assert not rig.request.paused and rig.sent[-1] == Pause(rig.ids[0], False)
        assert rig.stream._patience.timer is None
        rig.end(0)
        await task
        assert events(rig.text)[-1] == "[DONE]"

    scenario(main)


def test_a_client_that_does_not_read_the_end_is_not_waited_for() -> None:
    async def main() -> None:
        rig = Rig(slow_s=0.01)
        rig.feed((0, 0, "a"))
        task = rig.start()
        await turn()
        rig.wire.writable = False
        rig.end(0)

        def lost() -> None:
            rig.wire.aborted = True
            rig.stream.lost()

        rig.wire.abort = lost  # type: ignore[method-assign]
        await task
        assert rig.wire.aborted

    scenario(main)


def test_an_error_is_one_event_without_done() -> None:
    async def main() -> None:
        rig = Rig(n=2, include_usage=True)
        task = rig.start()
        await turn()
        rig.feed((0, 0, "a"))
        rig.hub.fail(rig.request, Reject(RejectReason.INTERNAL, "broken"))
        rig.hub.flush()
        await task
        found = events(rig.text)
        assert "[DONE]" not in found
        errors = [chunk for chunk in found if "error" in chunk]
        assert len(errors) == 1 and errors[0] is found[-1]
        assert errors[0]["choices"][0]["finish_reason"] == "error"
        assert errors[0]["error"] == {
            "message": "broken",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }

    scenario(main)


def test_a_lost_client_ends_the_stream_and_aborts() -> None:
    async def main() -> None:
        rig = Rig()
        task = rig.start()
        await turn()
        rig.wire.on_lost()
        await task
        assert rig.text.count(b"data: ") == 1 and not rig.hub.choices and rig.wire.on_lost is None

    scenario(main)


def test_a_cancelled_stream_aborts() -> None:
    async def main() -> None:
        rig = Rig()
        task = rig.start()
        await turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rig.hub.choices

    scenario(main)


def test_silence_is_filled_with_comments() -> None:
    async def main() -> None:
        rig = Rig("completion")
        rig.stream.keep_alive()
        assert not rig.stream.opened.done()  # it may still be refused
        rig.hub.feed(msgspec.structs.replace(rows(), accepted=pack_u64(rig.ids)), 1.0)
        rig.hub.flush()
        assert not rig.stream.opened.done()  # the status is better told when there is text
        rig.stream.keep_alive()
        assert rig.stream.opened.done()
        task = rig.start()
        await turn()
        rig.stream.keep_alive()
        assert rig.text == KEEP_ALIVE
        rig.end(0)
        await task
        assert events(rig.text)[-1] == "[DONE]"

    scenario(main)


def test_usage_and_token_ids_in_every_chunk() -> None:
    hub = Hub(Routes(0, 1), 100, lambda peer, message: True, Figures(), 30.0)
    submit = Submit(0, PromptKind.TEXT, Sampling(16), options=Options(0, 0, True, True))
    request = hub.open([submit], [Peer("tokenizer", 0, 9, "")], 0.0, 100)
    (choice,) = request.choices
    told = [TextFormat(choice.seq_id, prompt_tokens=3, prompt=pack_i32([1, 2, 3]))]
    batch = rows((choice.seq_id, 0, 2, 'a","usage":null}'))
    hub.feed(msgspec.structs.replace(batch, formats=told, ids={choice.seq_id: (0, pack_i32([7, 8]))}), 1.0)
    hub.feed(msgspec.structs.replace(rows(), ids={choice.seq_id: (0, pack_i32([7, 8]))}), 1.0)  # a repeat
    chunks = Chunks("completion", "x", 5, "m", True, continuous=True)
    before, after = chunks.text(0)
    assert choice.answer is not None
    body = chunks.prompt(choice, chunks.empty(0))
    body += before + json.dumps(choice.take()).encode() + chunks.reported(choice, after)
    ids, text = events(chunks.with_usage(body, request))
    assert ids["choices"][0]["token_ids"] == [] and ids["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert text["choices"][0]["text"] == 'a","usage":null}' and text["choices"][0]["token_ids"] == [7, 8]
    for chunk in (ids, text):
        assert chunk["usage"]["prompt_tokens"] == 3 and chunk["usage"]["completion_tokens"] == 2
    assert chunks.opening(choice) == b""
    request.echoes, choice.answer.prompt_taken = ["said"], False
    (echoed,) = events(chunks.opening(choice))
    assert echoed["choices"][0]["text"] == "said" and echoed["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    chat = Chunks("chat", "x", 5, "m", True)
    for taken in (False, True):
        choice.answer.prompt_taken = taken
        (opening,) = events(chat.opening(choice))
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": "said"}
        assert opening.get("prompt_token_ids") == (None if taken else [1, 2, 3]), "once, where whole replies have them"

"""Server-sent events of a generation: constant JSON around each choice's text, and the stream that writes them.

One `EventStream` per streaming request, driven by the hub on the event loop. Each `update` takes all text that has
come and makes one write: tokens that wait together share one event. While the client's socket is full nothing is
taken; the hub bounds what may wait. A client that takes nothing for `slow_s` while there is something is given up.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from common.columns import unpack_i32
from common.dialects.events import Event, merged
from common.errors import Reject, RejectReason
from common.protocol import FinishReason
from services.api import errors, slow
from services.api.answer import Answer
from services.api.hub import Choice, Hub, Request
from services.api.schema.logprobs import columns_of, content_of
from services.api.schema.replies import Usage, delta_of, stop_reason, usage_of, usage_so_far
from services.api.server import Wire

DONE = b"data: [DONE]\n\n"
NO_LOGPROBS = b'"logprobs":null'
NO_USAGE = b',"usage":null}\n\n'
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"transfer-encoding", b"chunked"),
]
LAST_WRITE_S = 5.0  # for a client that was cut because it does not read
encode = msgspec.json.encode


class Chunks:
    """The chunks of one response: `kind` "chat" or "completion". Only text is encoded per event."""

    def __init__(
        self, kind: str, identity: str, created: int, model: str, include_usage: bool, continuous: bool = False
    ) -> None:
        """`continuous`: every chunk has the usage so far, not only the last one."""
        self.continuous = continuous
        chat = kind == "chat"
        name = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": identity, "object": name, "created": created, "model": model, "system_fingerprint": None}
        self._head = b"data: " + encode(head)[:-1]
        self._tail = NO_USAGE if include_usage else b"}\n\n"
        self._body = (b'"delta":{"content":', b"}") if chat else (b'"text":', b"")
        self._empty = b'"delta":{}' if chat else b'"text":""'
        self._chat = chat

    def reported(self, choice: Choice, chunk: bytes) -> bytes:
        """A chunk, or its end, with log-probabilities and ids of the tokens since the last one; no text can look so."""
        told, ids = None, b""
        if choice.reported is not None:
            told = content_of(choice) if self._chat else columns_of(choice)
        if (answer := answer_with_ids(choice)) is not None:
            ids = b'"token_ids":%b,' % encode(answer.take_ids())
        elif told is None:
            return chunk
        return chunk.replace(NO_LOGPROBS, b'%b"logprobs":%b' % (ids, encode(told)), 1)

    def prompt(self, choice: Choice, chunk: bytes) -> bytes:
        """A whole chunk with the prompt's token ids where whole replies have them, if they are wanted and known."""
        answer = answer_with_ids(choice)
        if answer is None or answer.prompt_taken:
            return chunk
        answer.prompt_taken = True
        ids = b'"prompt_token_ids":' + encode(unpack_i32(answer.told.prompt).tolist())
        if self._chat:
            return b"%b,%b%b" % (self._head, ids, chunk.removeprefix(self._head))
        return chunk.replace(NO_LOGPROBS, b'%b,"token_ids":[],%b' % (ids, NO_LOGPROBS), 1)

    def text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON text of a choice."""
        before, after = self._body
        return (
            b'%b,"choices":[{"index":%d,%b' % (self._head, index, before),
            b'%b,"logprobs":null,"finish_reason":null}]%b' % (after, self._tail),
        )

    def events(self, index: int, events: list[Event]) -> list[bytes]:
        """One chunk each. What a call's arguments gained together is one piece."""
        end = b',"logprobs":null,"finish_reason":null}]' + self._tail
        head = b'%b,"choices":[{"index":%d,"delta":' % (self._head, index)
        return [head + encode(delta_of(event)) + end for event in merged(events)]

    def empty(self, index: int) -> bytes:
        """A chunk without text."""
        values = self._head, index, self._empty, self._tail
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":null}]%b' % values

    def with_usage(self, chunks: bytes, request: Request, opening: bool = False) -> bytes:
        """The same chunks with the usage so far; no text can look like the place of it, with its line ends."""
        return chunks.replace(NO_USAGE, b',"usage":%b}\n\n' % encode(usage_so_far(request, opening)))

    def opening(self, choice: Choice) -> bytes:
        """The first chunk of a chat choice tells the role; both what they echo, if they do."""
        echo = encode(choice.echo)
        if not self._chat:
            before, after = self.text(choice.index)
            return self.prompt(choice, before + echo + after) if choice.echo else b""
        delta = b'"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null' % echo
        return self.prompt(choice, b'%b,"choices":[{"index":%d,%b}]%b' % (self._head, choice.index, delta, self._tail))

    def end(self, choice: Choice, failure: errors.Problem | None) -> bytes:
        """The last chunk of a choice; with a failure also the error object that OpenAI's client raises."""
        assert choice.finished is not None
        word = b"error" if failure else choice.word.encode()
        why = encode(stop_reason(choice.finished))
        values = (self._head, choice.index, self._empty, word, why)
        chunk = b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b}]' % values
        if failure:
            chunk += b',"error":' + encode(failure)
        return chunk + self._tail

    def usage(self, usage: Usage) -> bytes:
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage))


def answer_with_ids(choice: Choice) -> Answer | None:
    """What has the choice's token ids, if they are wanted and have begun to come."""
    return choice.answer if choice.submit.options.token_ids else None


class Stream(ABC):
    """The response of a streaming request; an ASGI application once `opened` is done. What it says its class knows."""

    keep_alive_event = KEEP_ALIVE

    def __init__(
        self,
        request: Request,
        hub: Hub,
        wire: Wire,
        alarm: asyncio.TimerHandle | None = None,
        slow_s: float = 30.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()  # there is text, and no refusal can come any more
        self._ended: asyncio.Future[None] = loop.create_future()
        self._request, self._hub, self._wire, self._alarm = request, hub, wire, alarm
        self._patience = slow.Patience(slow_s, self._lose_patience)
        self._started = self._gone = False
        request.consumer = self
        wire.watch(self.lost)

    @abstractmethod
    def _opening(self) -> bytes:
        """What comes before all text."""

    @abstractmethod
    def _drain(self) -> bytes:
        """Events for all text and ends since the last call."""

    @abstractmethod
    async def _last(self) -> bytes:
        """What comes after them."""

    def update(self) -> None:
        """Writes everything new, unless the response has not begun or the client's socket is full."""
        request = self._request
        if not self._started:
            if (request.failure is not None or (request.updated and request.accepted)) and not self.opened.done():
                self.opened.set_result(None)
            return
        if request.failure is not None and not self._ended.done():
            self._ended.set_result(None)  # a full socket does not hold back the end
        if not self._wire.writable:
            self._patience.start()
            return
        if self._patience.timer is not None:
            self._patience.stop()
        if (body := self._drain()) and not self._wire.write_chunk(body):
            self._patience.start()  # nothing more may come that would look at the socket again
        if request.paused:
            slow.go_on(request, self._hub.send)
        if not request.open and not self._ended.done():
            self._ended.set_result(None)

    def _lose_patience(self) -> None:
        """The client has not emptied its socket for long. If all is said already, it has just not read it."""
        self._hub.figures.slow_clients += 1
        if self._request.open:
            self._hub.fail(
                self._request, Reject(RejectReason.DEADLINE, f"the client did not read for {self._patience.wait_s:g} s")
            )
            self._hub.flush()
        else:
            self._wire.abort()

    def lost(self) -> None:
        """The client has gone."""
        self._gone = True
        self._hub.cancel(self._request)
        for future in (self.opened, self._ended):
            if not future.done():
                future.set_result(None)

    def keep_alive(self) -> None:
        """A comment, so that nothing between here and the client takes a long prefill for a dead connection.

        What may still be refused gets its headers later, with the status that it then has.
        """
        if not self.opened.done():
            if self._request.accepted:
                self.opened.set_result(None)
        elif self._started and self._wire.writable:
            slow.go_on(self._request, self._hub.send)
            self._wire.write_chunk(self.keep_alive_event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": self._opening() + self._drain(), "more_body": True})
            self._started = True
            self._wire.on_writable = self.update
            self.update()
            await self._ended
            if not self._gone:
                await self._finish(send)
        finally:
            self.close()

    def close(self) -> None:
        """Nothing more is written; what is not finished is aborted."""
        self._wire.on_writable = self._wire.on_lost = None
        self._patience.stop()
        if self._alarm is not None:
            self._alarm.cancel()
        self._hub.cancel(self._request)

    async def _finish(self, send: Send) -> None:
        """The last bytes. A client that was cut for not reading gets a few seconds to take them."""
        last = self._drain() + await self._last()
        message: dict[str, Any] = {"type": "http.response.body", "body": last, "more_body": False}
        if self._wire.writable:  # it does not wait
            await send(message)
            return
        try:
            async with asyncio.timeout(LAST_WRITE_S if self._request.failure else self._patience.wait_s):
                await send(message)
        except TimeoutError:
            self._wire.abort()


class EventStream(Stream):
    """A stream of chunks."""

    def __init__(
        self,
        request: Request,
        hub: Hub,
        chunks: Chunks,
        wire: Wire,
        include_usage: bool,
        alarm: asyncio.TimerHandle | None = None,
        slow_s: float = 30.0,
    ) -> None:
        self._chunks, self._include_usage, self._failed = chunks, include_usage, False
        self._frames = [chunks.text(choice.index) for choice in request.choices]
        self._beside = bool(request.reports) or any(choice.submit.options.token_ids for choice in request.choices)
        super().__init__(request, hub, wire, alarm, slow_s)

    def _opening(self) -> bytes:
        opening = b"".join(map(self._chunks.opening, self._request.choices))
        return self._chunks.with_usage(opening, self._request, opening=True) if self._chunks.continuous else opening

    async def _last(self) -> bytes:
        if self._request.failure is not None:
            return b""
        return (self._chunks.usage(usage_of(self._request)) if self._include_usage else b"") + DONE

    def _drain(self) -> bytes:
        updated = self._request.updated
        pieces: list[bytes] = []
        for choice in updated:
            answer = answer_with_ids(choice) if self._beside else None
            if answer is not None and not answer.prompt_taken:
                pieces.append(self._chunks.prompt(choice, self._chunks.empty(choice.index)))
            if choice.reads:
                if events := self._chunks.events(choice.index, choice.read()):
                    pieces += (self._chunks.reported(choice, events[0]), *events[1:])
            elif choice.parts:
                before, after = self._frames[choice.index]
                told = self._chunks.reported(choice, after) if self._beside else after
                pieces += (before, encode(choice.take()), told)
            if answer is not None and len(answer.ids) > answer.ids_taken:
                pieces.append(self._left(choice))
            if choice.finished is not None:
                pieces += self._left(choice), self._end(choice)
        updated.clear()
        body = b"".join(pieces)
        return self._chunks.with_usage(body, self._request) if self._chunks.continuous else body

    def _left(self, choice: Choice) -> bytes:
        """Log-probabilities and token ids that have no text to come with."""
        answer = answer_with_ids(choice)
        if answer is not None and len(answer.ids) == answer.ids_taken:
            return b""  # the rest comes with the end
        empty = self._chunks.empty(choice.index)
        told = self._chunks.reported(choice, empty)
        return told if told is not empty else b""

    def _end(self, choice: Choice) -> bytes:
        """One error event at most: the first says it all."""
        assert choice.finished is not None
        if choice.finished.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            return self._chunks.reported(choice, self._chunks.end(choice, None))
        if self._failed or self._request.failure is None:
            return b""
        self._failed = True
        return self._chunks.end(choice, errors.of_reject(self._request.failure)[1])

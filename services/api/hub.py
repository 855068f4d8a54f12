"""Open requests and what has come back for them. Pure: no sockets, no clock, no event loop.

Owns every open choice and call; fed by the process with the tokenizers' messages, read by the consumers of endpoints.
Invariants: a choice gets exactly one terminal; its text has no repeats and no holes; what a slow client has not taken
is bounded; whatever ends without the tokenizer's own terminal is aborted there.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from common.columns import unpack_i32, unpack_u64
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    Detokenize,
    Detokenized,
    FinishReason,
    Peer,
    Refused,
    Submit,
    TextBatch,
    TextFinished,
    Tokenize,
    Tokenized,
    make_seq_id,
)
from services.api.errors import reason_of
from services.api.figures import Figures

WORDS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
Send = Callable[[int, msgspec.Struct], bool]
Reply = Callable[[Tokenized | Detokenized | Reject], None]


class Consumer(Protocol):
    """The reader of one request, called after each batch that changed it."""

    def update(self) -> None: ...
    def keep_alive(self) -> None: ...


class Choice:
    """One sequence of a request. `parts` is the text that its consumer has not taken yet, one entry per row."""

    __slots__ = ("finished", "first", "index", "last_s", "parts", "received", "request", "seq_id", "tokenizer")

    def __init__(self, request: "Request", seq_id: int, first: int, tokenizer: int) -> None:
        self.request, self.seq_id, self.tokenizer = request, seq_id, tokenizer
        self.first = first  # seq_id of the first choice of the same prompt
        self.index = len(request.choices)
        self.received = 0  # output tokens
        self.parts: list[str] = []
        self.last_s = 0.0  # time of the newest row
        self.finished: TextFinished | None = None

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self.parts)
        self.parts.clear()
        return text


class Request:
    """One HTTP request: choices in order, those with news in `updated`, and why it failed if it did."""

    __slots__ = ("changed", "choices", "consumer", "failure", "heard_s", "limit", "open", "opened_s", "updated")

    def __init__(self, opened_s: float, limit: int) -> None:
        self.opened_s = self.heard_s = opened_s
        self.limit = limit  # rows that may wait for the client; 0: all of them may
        self.choices: list[Choice] = []
        self.updated: list[Choice] = []
        self.open = 0  # choices without a terminal
        self.failure: Reject | None = None
        self.changed = False
        self.consumer: Consumer | None = None


class Hub:
    def __init__(self, instance: int, incarnation: int, max_open: int, send: Send, figures: Figures) -> None:
        self.choices: dict[int, Choice] = {}
        self.calls: dict[int, tuple[int, Reply]] = {}  # by call id: tokenizer, where the answer goes
        self.work: Counter[int] = Counter()  # open choices and calls by tokenizer incarnation
        self.figures = figures
        self._given: Counter[int] = Counter()  # everything ever sent, breaks ties between idle tokenizers
        self._instance, self._salt, self._max_open, self._send = instance, incarnation, max_open, send
        self._counter = 0
        self._changed: list[Request] = []

    # --- from the endpoints -------------------------------------------------------------------------------------------

    def open(self, submits: list[Submit], tokenizers: list[Peer], now_s: float, limit: int = 0) -> Request:
        """Sends the prompts of one HTTP request (`seq_id` is filled in here) to the tokenizers with the least work.

        Raises Reject, with nothing left open, if there is no room for all choices or no tokenizer takes them.
        """
        count = sum(submit.n for submit in submits)
        if len(self.choices) + count > self._max_open:
            self.figures.refused += 1
            raise Reject(RejectReason.OVERLOADED, f"{self._max_open} choices are open already, try again later")
        request = Request(now_s, limit)
        for submit in submits:
            peer = self._pick(tokenizers)
            first = self._take_ids(peer, submit.n)
            for seq_id in range(first, first + submit.n):
                choice = Choice(request, seq_id, first, peer.incarnation)
                request.choices.append(choice)
                self.choices[seq_id] = choice
            request.open += submit.n
            self.work[peer.incarnation] += submit.n
            self._given[peer.incarnation] += submit.n
            if not self._send(peer.incarnation, msgspec.structs.replace(submit, seq_id=first)):
                self.cancel(request)
                self.figures.refused += 1
                raise Reject(RejectReason.OVERLOADED, "the tokenizer takes no more work, try again later")
        self.figures.requests += 1
        return request

    def call(self, message: Tokenize | Detokenize, tokenizers: list[Peer], reply: Reply) -> None:
        """One question to a tokenizer (`call_id` is filled in here); `reply` is called once. Raises Reject."""
        if len(self.calls) >= self._max_open:
            raise Reject(RejectReason.OVERLOADED, f"{self._max_open} calls are open already, try again later")
        peer = self._pick(tokenizers)
        call_id = self._take_ids(peer, 1)
        if not self._send(peer.incarnation, msgspec.structs.replace(message, call_id=call_id)):
            raise Reject(RejectReason.OVERLOADED, "the tokenizer takes no more work, try again later")
        self.calls[call_id] = peer.incarnation, reply
        self.work[peer.incarnation] += 1

    def cancel(self, request: Request) -> None:
        """The client has gone: aborts what is not finished. Repeating it is harmless."""
        self._end_all(request, FinishReason.ABORT, "the client has gone")

    def fail(self, request: Request, reject: Reject) -> None:
        """Ends a request from our side: error terminals for its unfinished choices, aborted at their tokenizers."""
        if request.open:
            request.failure = request.failure or reject
            self._end_all(request, FinishReason.ERROR, reject.message)
            self._note(request)

    def requests(self) -> list[Request]:
        """All open requests."""
        return list({id(choice.request): choice.request for choice in self.choices.values()}.values())

    # --- from the tokenizers ------------------------------------------------------------------------------------------

    def feed(self, batch: TextBatch, now_s: float) -> None:
        """New text. Consumers hear of it at the next `flush`, so that several batches cost them one write."""
        rows = len(batch.texts)
        if (len(batch.seq_ids), len(batch.first_index), len(batch.counts)) != (8 * rows, 4 * rows, 4 * rows):
            self.figures.unknown_results += 1
            return
        choices, inter_token = self.choices, self.figures.inter_token
        columns = unpack_u64(batch.seq_ids), unpack_i32(batch.first_index), unpack_i32(batch.counts)
        for seq_id, first, count, text in zip(*columns, batch.texts, strict=True):
            choice = choices.get(seq_id)
            if choice is None:
                self.figures.unknown_results += 1
                continue
            received = choice.received
            if first != received or count < 0:
                self._out_of_order(choice, first, count)
                continue
            choice.received = received + count
            if not count:
                pass  # text that was held back, released by the terminal
            elif received:
                inter_token.add((now_s - choice.last_s) / count, count)
            else:
                self.figures.first_token.add(now_s - choice.request.opened_s)
            choice.last_s = now_s
            if text:
                self._append(choice, text)
        for finished in batch.finished:
            self._finish(finished, now_s)

    def refuse(self, refused: Refused) -> None:
        """The terminal of a Submit or call that was not accepted: the whole request fails."""
        self.figures.refused += 1
        reject = Reject(reason_of(refused.reason), refused.message, refused.param)
        if refused.seq_id in self.calls:
            self._answer(refused.seq_id, reject)
        elif choice := self.choices.get(refused.seq_id):
            request = choice.request
            request.failure = request.failure or reject
            for same in request.choices:
                if same.first == choice.first and same.finished is None:  # not known there: no Abort
                    self._close(same, TextFinished(same.seq_id, FinishReason.ERROR, 0, 0, message=reject.message))
            self._end_all(request, FinishReason.ERROR, reject.message)
            self._note(request)
        else:
            self.figures.unknown_results += 1

    def answer(self, reply: Tokenized | Detokenized) -> None:
        if reply.call_id in self.calls:
            self._answer(reply.call_id, reply)
        else:
            self.figures.unknown_results += 1

    def lose(self, tokenizer: int) -> None:
        """A tokenizer has left. Its requests end here; re-submitting them elsewhere would replace this method."""
        reject = Reject(RejectReason.UNAVAILABLE, "the tokenizer of this request has gone")
        for call_id in [key for key, (owner, _) in self.calls.items() if owner == tokenizer]:
            self._answer(call_id, reject)
        for request in {id(c.request): c.request for c in self.choices.values() if c.tokenizer == tokenizer}.values():
            self.fail(request, reject)
        self.work.pop(tokenizer, None)
        self._given.pop(tokenizer, None)

    def flush(self) -> None:
        """Tells every consumer with news, once."""
        changed, self._changed = self._changed, []
        for request in changed:
            request.changed = False
            if request.consumer is not None:
                request.consumer.update()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pick(self, tokenizers: list[Peer]) -> Peer:
        if not tokenizers:
            raise Reject(RejectReason.UNAVAILABLE, "no tokenizer is ready")
        return min(tokenizers, key=lambda peer: (self.work[peer.incarnation], self._given[peer.incarnation]))

    def _take_ids(self, peer: Peer, count: int) -> int:
        if self._counter + count > 1 << 32:
            self._counter = 0
        first = make_seq_id(self._instance, peer.instance, self._salt, self._counter)
        self._counter += count
        return first

    def _append(self, choice: Choice, text: str) -> None:
        request, parts = choice.request, choice.parts
        if not parts:
            request.updated.append(choice)
        parts.append(text)
        if not request.limit:
            return  # it is read when all of it is there
        if not request.changed:
            request.changed = True
            self._changed.append(request)
        if len(parts) > request.limit:
            self.figures.slow_clients += 1
            self.fail(request, Reject(RejectReason.INTERNAL, f"the client left {request.limit} events unread"))

    def _note(self, request: Request) -> None:
        if not request.changed:
            request.changed = True
            self._changed.append(request)

    def _out_of_order(self, choice: Choice, first: int, count: int) -> None:
        if count >= 0 and first >= 0 and first + count <= choice.received:
            return  # a repeat
        message = f"output token {choice.received} was lost between services"
        self.fail(choice.request, Reject(RejectReason.INTERNAL, message))

    def _finish(self, finished: TextFinished, now_s: float) -> None:
        choice = self.choices.get(finished.seq_id)
        if choice is None:
            self.figures.unknown_results += 1
            return
        request, figures = choice.request, self.figures
        if choice.seq_id == choice.first:
            figures.prompt_tokens += finished.prompt_tokens
            figures.cached_tokens += finished.cached_tokens
            figures.prompt_size.add(finished.prompt_tokens)
        figures.output_size.add(finished.output_tokens)
        figures.request.add(now_s - request.opened_s)
        self._close(choice, finished)
        if finished.reason in (FinishReason.ERROR, FinishReason.ABORT):
            message = finished.message or "the request was aborted by the server"
            request.failure = Reject(reason_of(finished.code), message)
            self._end_all(request, FinishReason.ERROR, request.failure.message)
        if request.limit or not request.open:
            self._note(request)

    def _end_all(self, request: Request, reason: FinishReason, message: str) -> None:
        for choice in request.choices:
            if choice.finished is None:
                self._send(choice.tokenizer, Abort(choice.seq_id))
                self._close(choice, TextFinished(choice.seq_id, reason, 0, choice.received, message=message))

    def _close(self, choice: Choice, finished: TextFinished) -> None:
        choice.finished = finished
        if not choice.parts:
            choice.request.updated.append(choice)
        choice.request.open -= 1
        del self.choices[choice.seq_id]
        self._release(choice.tokenizer)
        self.figures.output_tokens += choice.received
        self.figures.finished[WORDS[finished.reason]] += 1

    def _answer(self, call_id: int, reply: Tokenized | Detokenized | Reject) -> None:
        tokenizer, callback = self.calls.pop(call_id)
        self._release(tokenizer)
        callback(reply)

    def _release(self, tokenizer: int) -> None:
        self.work[tokenizer] -= 1

"""Open requests and what has come back for them. Pure: no sockets, no clock, no event loop.

Owns every open choice and call; fed by the process with the tokenizers' messages, read by the consumers of endpoints.
Invariants: a choice gets exactly one terminal; its text has no repeats and no holes; what a slow client has not taken
is bounded; whatever ends without the tokenizer's own terminal is aborted there; a choice whose tokenizer has gone waits
for another one, which sends what is missing of its text.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from common.columns import unpack_i32, unpack_u64
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    Describe,
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
)
from services.api import slow
from services.api.errors import reason_of
from services.api.figures import Figures
from services.api.requests import NOBODY as NOBODY
from services.api.requests import WORDS as WORDS
from services.api.requests import Choice as Choice
from services.api.requests import Request as Request
from services.api.requests import take_extras
from services.api.routes import Routes

ABORTS_KEPT = 1024
Send = Callable[[int, msgspec.Struct], bool]
Reply = Callable[[Tokenized | Detokenized | Reject], None]


class Hub:
    """`send` takes the receiver's incarnation; 0: all schedulers. `recover_s`: how long a choice may wait."""

    def __init__(self, routes: Routes, max_open: int, send: Send, figures: Figures, recover_s: float) -> None:
        self.choices: dict[int, Choice] = {}
        self.calls: dict[int, tuple[int, Reply]] = {}  # by call id: tokenizer, where the answer goes
        self.routes, self.figures = routes, figures
        self.recovered = 0  # choices that have moved
        self._max_open, self.send, self._recover_s = max_open, send, recover_s
        self._waiting: list[Choice] = []  # those of NOBODY, and some that have ended
        self._aborted: deque[tuple[int, int]] = deque(maxlen=ABORTS_KEPT)  # tokenizer and origin, newest last
        self._changed: list[Request] = []

    def open(self, submits: list[Submit], tokenizers: list[Peer], now_s: float, limit: int = 0) -> Request:
        """Sends the prompts of one HTTP request (`seq_id` is filled in here) to the tokenizers with the least work.

        Without any they wait. Raises Reject, with nothing left open, if there is no room or a link is full.
        """
        count = sum(submit.n for submit in submits)
        if len(self.choices) + count > self._max_open:
            self.figures.refused += 1
            raise Reject(RejectReason.OVERLOADED, f"{self._max_open} choices are open already, try again later")
        request = Request(now_s, limit)
        for submit in submits:
            peer = self.routes.pick(tokenizers) if tokenizers else NOBODY
            first = self.routes.take_ids(peer, submit.n)
            for seq_id in range(first, first + submit.n):
                choice = Choice(request, seq_id, first, peer.incarnation, submit)
                request.choices.append(choice)
                self.choices[seq_id] = choice
            request.open += submit.n
            self.routes.add(peer.incarnation, submit.n)
            if peer is NOBODY:
                for choice in request.choices[-submit.n :]:
                    self._wait(choice, now_s)
            elif not self.send(peer.incarnation, msgspec.structs.replace(submit, seq_id=first)):
                self.cancel(request)
                self.figures.refused += 1
                raise Reject(RejectReason.OVERLOADED, "the tokenizer takes no more work, try again later")
        self.figures.requests += 1
        return request

    def call(self, message: Tokenize | Detokenize | Describe, tokenizers: list[Peer], reply: Reply) -> None:
        """One question to a tokenizer (`call_id` is filled in here); `reply` is called once. Raises Reject."""
        if len(self.calls) >= self._max_open:
            raise Reject(RejectReason.OVERLOADED, f"{self._max_open} calls are open already, try again later")
        peer = self.routes.pick(tokenizers)
        call_id = self.routes.take_ids(peer, 1)
        if not self.send(peer.incarnation, msgspec.structs.replace(message, call_id=call_id)):
            raise Reject(RejectReason.OVERLOADED, "the tokenizer takes no more work, try again later")
        self.calls[call_id] = peer.incarnation, reply
        self.routes.add(peer.incarnation)

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

    def feed(self, batch: TextBatch, now_s: float) -> None:
        """New text. Consumers hear of it at the next `flush`, so that several batches cost them one write."""
        self.figures.unknown_results += take_extras(self.choices, batch)
        rows = len(batch.texts)
        if (len(batch.seq_ids), len(batch.first_index), len(batch.counts)) != (8 * rows, 4 * rows, 4 * rows):
            self.figures.unknown_results += 1
            return
        choices, engine = self.choices, 0
        inter_token = self.figures.at(engine).inter_token
        since_s, alike = now_s, 0  # rows of one token after one that came then: mostly the whole batch, so one sum
        columns = unpack_u64(batch.seq_ids), unpack_i32(batch.first_index), unpack_i32(batch.counts)
        for seq_id, first, count, text in zip(*(each.tolist() for each in columns), batch.texts, strict=True):
            choice = choices.get(seq_id)
            if choice is None:
                self.figures.unknown_results += 1
                continue
            received = choice.received
            if first != received or count < 0:
                self._out_of_order(choice, first, count)
                continue
            choice.received = received + count
            if choice.engine != engine:
                inter_token.add(now_s - since_s, alike)
                engine, alike = choice.engine, 0
                inter_token = self.figures.at(engine).inter_token
            if count == 1 and received:
                if choice.last_s != since_s:
                    inter_token.add(now_s - since_s, alike)
                    since_s, alike = choice.last_s, 0
                alike += 1
            elif count and received:
                inter_token.add((now_s - choice.last_s) / count, count)
            elif count:  # none: text that was held back, released by the terminal
                choice.begin(self.figures, now_s)
            choice.last_s = now_s
            if text:
                request, parts = choice.request, choice.parts
                if not parts:
                    request.updated.append(choice)
                parts.append(text)
                if limit := request.limit:  # else it is read when all of it is there
                    if not request.changed:
                        self._note(request)
                    if len(parts) > limit and not slow.hold_back(request, len(parts), self.send, self.figures):
                        message = f"the client left {len(parts)} events unread"
                        self.fail(request, Reject(RejectReason.INTERNAL, message))
        inter_token.add(now_s - since_s, alike)
        for finished in batch.finished:
            self._finish(finished, now_s)
        for seq_id in unpack_u64(batch.accepted[: len(batch.accepted) & ~7]):
            if (choice := choices.get(seq_id)) is not None:
                choice.accepted = True
                self._note(choice.request)

    def refuse(self, refused: Refused) -> None:
        """The terminal of a Submit or call that was not accepted: the whole request fails."""
        self.figures.refused += 1
        reject = Reject(reason_of(refused.reason), refused.message, refused.param)
        if refused.seq_id in self.calls:
            self._answer(refused.seq_id, reject)
        elif choice := self.choices.get(refused.seq_id):
            if choice.moved and reject.reason is RejectReason.UNAVAILABLE:
                self._wait(choice, choice.lost_s)
                return
            request = choice.request
            request.failure = request.failure or reject
            together = [same for same in request.choices if same.first == choice.first and not same.moved]
            for same in [choice] if choice.moved else together:
                if same.finished is None:  # not known there: no Abort
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

    def lose(self, tokenizer: int, now_s: float) -> None:
        """A tokenizer has left. Its calls end, its choices wait for `recover`."""
        reject = Reject(RejectReason.UNAVAILABLE, "the tokenizer of this call has gone")
        for call_id in [key for key, (owner, _) in self.calls.items() if owner == tokenizer]:
            self._answer(call_id, reject)
        for choice in self.choices.values():
            if choice.tokenizer == tokenizer:
                self._wait(choice, now_s)
        for owner, origin in self._aborted:
            if owner == tokenizer:  # it may have died before it told the scheduler
                self.send(NOBODY.incarnation, Abort(origin))
        self.routes.forget(tokenizer)

    def recover(self, tokenizers: list[Peer] | None, now_s: float) -> None:
        """Hands waiting choices to the tokenizers with the least work; late ones fail. None: this time counts not."""
        waiting, self._waiting = self._waiting, []
        for choice in (choice for choice in waiting if choice.waits):  # some may end, or move with others, on the way
            if tokenizers is None:
                choice.lost_s = now_s
            if now_s - choice.lost_s > self._recover_s:
                self.fail(choice.request, Reject(RejectReason.UNAVAILABLE, "no tokenizer came in time"))
            elif not tokenizers or not self._move(choice, self.routes.pick(tokenizers)):
                self._waiting.append(choice)

    def flush(self) -> None:
        """Tells every consumer with news, once."""
        changed, self._changed = self._changed, []
        for request in changed:
            request.changed = False
            if request.consumer is not None:
                request.consumer.update()

    def _wait(self, choice: Choice, lost_s: float) -> None:
        self.routes.release(choice.tokenizer)
        choice.wait(lost_s)
        self.routes.add(NOBODY.incarnation)
        self._waiting.append(choice)

    def _move(self, choice: Choice, peer: Peer) -> bool:
        """The tokenizer gets all that is needed to go on; False if its link is full."""
        seq_id = self.routes.take_ids(peer, len(together := choice.together))
        if not self.send(peer.incarnation, choice.again(seq_id)):
            return False
        for place, moving in enumerate(together):
            self.choices[seq_id + place] = self.choices.pop(moving.seq_id)
            self.routes.release(moving.tokenizer)
            moving.move(seq_id + place, peer.incarnation)
            self.routes.add(peer.incarnation)
            self.recovered += 1
        return True

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
        request = choice.request
        choice.measure(self.figures, finished, now_s)
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
                if choice.tokenizer == NOBODY.incarnation:
                    self.send(NOBODY.incarnation, Abort(choice.origin))
                else:
                    self.send(choice.tokenizer, Abort(choice.seq_id))
                    self._aborted.append((choice.tokenizer, choice.origin))
                self._close(choice, TextFinished(choice.seq_id, reason, 0, choice.received, message=message))

    def _close(self, choice: Choice, finished: TextFinished) -> None:
        choice.end(finished)
        if not choice.parts:
            choice.request.updated.append(choice)
        choice.request.open -= 1
        del self.choices[choice.seq_id]
        self.routes.release(choice.tokenizer)
        self.figures.output_tokens += choice.received
        self.figures.at(choice.engine).finished[WORDS[finished.reason]] += 1

    def _answer(self, call_id: int, reply: Tokenized | Detokenized | Reject) -> None:
        tokenizer, callback = self.calls.pop(call_id)
        self.routes.release(tokenizer)
        callback(reply)

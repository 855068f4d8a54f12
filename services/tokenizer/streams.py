"""All open sequences: from Submit to the one terminal of each choice. Synchronous and free of sockets and clocks.

The only owner of sequences and outboxes; called by process.py. Invariants: every choice gets exactly one terminal
(or the request one Refused), its text covers its tokens 0, 1, 2 ... without a gap or a repeat, and what ended here is
unknown from then on, so late tokens of it are dropped. `take` is the hot path: one row of it costs about a microsecond.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from common.columns import unpack_i32, unpack_u64
from common.dialects.registry import Dialects
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    Finished,
    FinishReason,
    ModelFacts,
    Refused,
    Stop,
    Submit,
    TokenBatch,
)
from common.vocabulary import Vocabulary
from services.tokenizer.beams import Search
from services.tokenizer.encode import Prompt, fit, param_of, shortened
from services.tokenizer.formats import Formats
from services.tokenizer.lanes import Lane, Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.reports import check_report, take_reports
from services.tokenizer.sequence import Request, Sequence, first_admission, terminal

ID_RANGE = 1 << 64
NO_TOKEN = -1
NOT_FINISHED = Finished(0, FinishReason.ERROR)  # stands for a terminal that the scheduler has not sent


class Counts(msgspec.Struct):
    """Cumulative, for metrics."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unknown_results: int = 0


class BoxKey(NamedTuple):
    """What a seq_id tells about its API process."""

    instance: int
    salt: int


def box_key(seq_id: int) -> BoxKey:
    return BoxKey(seq_id >> 56, seq_id >> 32 & 0xFFFF)


def unpacked(batch: TokenBatch) -> tuple[list[int], list[int], list[int]] | None:
    """seq_ids, first_index and tokens of its rows; None for columns that do not fit together."""
    try:
        seq_ids = unpack_u64(batch.seq_ids).tolist()
        first_index = unpack_i32(batch.first_index).tolist()
        tokens = unpack_i32(batch.tokens).tolist()
    except TypeError:
        return None
    return (seq_ids, first_index, tokens) if len(seq_ids) == len(first_index) == len(tokens) else None


def strange(seq_ids: list[int], tokens: list[int], size: int) -> list[tuple[int, int]]:
    """Rows with tokens that do not exist, and which."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < size:
        return []
    return [(seq_id, token) for seq_id, token in zip(seq_ids, tokens, strict=True) if not 0 <= token < size]


def take_cached(told: dict[int, int], sequences: dict[int, Sequence]) -> None:
    """With their first tokens; what is told again was found when they began again."""
    for seq_id, cached in told.items():
        if (sequence := sequences.get(seq_id)) is not None and sequence.cached < 0:
            sequence.cached = cached


def _is_late(message: Refused, sequence: Sequence) -> bool:
    """Whether it is of the first admission: what was accepted before is not refused for want of room."""
    return message.reason == RejectReason.OVERLOADED and sequence.request.readmitted


class Streams:
    def __init__(self, lanes: Lanes) -> None:
        self.speak(Formats(Dialects(None, None), Vocabulary([])))  # until the model's are loaded
        self.boxes: dict[BoxKey, Outbox] = {}
        self.open_requests = 0
        self.counts = Counts()
        self.lanes = lanes
        self._sequences: dict[int, Sequence] = {}

    def speak(self, formats: Formats) -> None:
        self.formats, self.vocabulary = formats, formats.vocabulary

    def open(self, submit: Submit, box: Outbox) -> Request | None:
        """A new request, not encoded yet. None if a choice of it is open already, or its ids are none."""
        ids = range(submit.seq_id, submit.seq_id + submit.n)
        if not 0 <= ids.start < ids.stop <= ID_RANGE or any(seq_id in self._sequences for seq_id in ids):
            self.counts.unknown_results += 1
            return None
        request = Request(submit, box)
        for seq_id in request.choices():
            self._sequences[seq_id] = Sequence(seq_id, request, self.formats.words(submit))
        self.open_requests += 1
        return request

    def admit(self, request: Request, prompt: Prompt, model: ModelFacts) -> None:
        """Hands an encoded request to a scheduler. Raises Reject; then `refuse` it."""
        submit = request.submit
        tokens = shortened(prompt.tokens, submit, model.max_model_len, prompt.tail)
        max_tokens = fit(len(tokens), submit.sampling, model.max_model_len, param_of(submit.kind))
        words = msgspec.structs.replace(submit.sampling.words, banned=prompt.banned)
        sampling = msgspec.structs.replace(submit.sampling, max_tokens=max_tokens, grammar=prompt.grammar, words=words)
        check_report(len(tokens), submit.sampling.report)
        told = self.formats.told(submit, tokens)
        request.tokens, request.sampling, request.thinking = tokens, sampling, prompt.thinking
        if submit.options.beams is not None:
            request.search = Search(request, submit.options.beams, model)
        admit = first_admission(request)
        moved = submit.origin >= 0 and request.search is None  # it was accepted before
        lane = self.lanes.choose(admit.tokens, submit.cache_salt, submit.seq_id)
        if not moved and not lane.upstream.offer(admit):
            raise Reject(RejectReason.OVERLOADED, "the scheduler has more to do than it can take; try again later")
        request.admitted, request.format = True, told
        request.box.formats += [told] if told else []
        request.submit = msgspec.structs.replace(submit, text="", tokens=b"", messages=b"", template_kwargs=b"")
        at_start = self.vocabulary.lead_spaces > 0 and all(token in self.vocabulary.special for token in tokens)
        for seq_id in request.choices():
            sequence = self._sequences.get(seq_id)
            if sequence is None:
                lane.upstream.put(Abort(seq_id))  # ended while its prompt was encoded
                continue
            if at_start:
                sequence.start(self.formats.words(submit), True)
            if request.search is not None:
                request.search.join(sequence, self.lanes, lane, self.vocabulary)
            elif moved:
                self.lanes.ask(sequence)
            else:
                self.lanes.place(sequence, lane)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(tokens)

    def refuse(self, request: Request, reject: Reject) -> None:
        """Ends a request that is not served: by one Refused, or, if choices of it have begun or ended, one by one."""
        self.counts.refused += 1
        live = [sequence for seq_id in request.choices() if (sequence := self._sequences.get(seq_id)) is not None]
        if len(live) == request.submit.n and not any(sequence.output for sequence in live):
            request.box.replies.append(Refused(request.submit.seq_id, reject.reason, reject.message, reject.param))
            for sequence in live:
                self._forget(sequence)
        else:
            for sequence in live:
                self._finish(sequence, FinishReason.ERROR, message=reject.message)

    def refused(self, message: Refused, scheduler: int) -> None:
        """A scheduler does not take a request, or one choice of it when it was admitted again, or does not have it."""
        lane = self.lanes.lane(scheduler)
        if message.reason == RejectReason.NOT_FOUND:  # the answer to a question, which may have become idle
            self.lanes.denied(message.seq_id, lane)
        elif (sequence := lane.sequences.get(message.seq_id)) is None or _is_late(message, sequence):
            self.counts.unknown_results += 1
        elif message.seq_id == sequence.request.submit.seq_id and not sequence.request.readmitted:
            self.refuse(sequence.request, Reject(RejectReason(message.reason), message.message, message.param))
        else:
            self._finish(sequence, FinishReason.ERROR, message=message.message)

    def abort(self, seq_id: int) -> Request | None:
        """The API gives this choice up. Its request, or None if the choice has ended by itself."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return None
        if sequence.request.admitted:
            self.lanes.put(sequence, Abort(seq_id))
        elif sequence.request.submit.origin >= 0:
            self.lanes.put_all(Abort(sequence.request.submit.origin))
        self._finish(sequence, FinishReason.ABORT)
        return sequence.request

    def take(self, batch: TokenBatch, scheduler: int) -> None:
        """One step's tokens and terminals. Their text is in the boxes afterwards."""
        columns = unpacked(batch)
        if columns is None:
            self.counts.unknown_results += 1
            return
        lane = self.lanes.lane(scheduler)
        find = lane.sequences.get
        if self.lanes.asking:
            self.lanes.found({*columns[0], *(finished.seq_id for finished in batch.finished)}, lane)
        for seq_id, token in strange(columns[0], columns[2], self.vocabulary.size):
            if seq_id in lane.sequences:
                self._lost(lane.sequences[seq_id], f"the model gave token {token}, which does not exist")
        for lost in take_reports(batch.logprobs, lane.sequences) if batch.logprobs else ():
            self._lost(lost, "log-probabilities were lost between services")
        take_cached(batch.cached, lane.sequences)
        for finished in batch.finished:
            if (ended := find(finished.seq_id)) is not None:
                ended.ending, ended.fast = [], self.vocabulary.no_texts
        taken = 0
        for seq_id, index, token in zip(*columns, strict=True):
            sequence = find(seq_id)
            if sequence is None:
                self._unplaced(seq_id, lane)
                continue
            output = sequence.output
            if index != len(output):
                if index > len(output):
                    self._lost(sequence, f"output tokens {len(output)} to {index - 1} were lost")
                continue
            output.append(token)
            taken += 1
            text = sequence.fast[token]
            if text is None:
                self._take_slowly(sequence, index, token)
                continue
            box = sequence.box
            if sequence.turn == box.turn:
                row = sequence.row
                box.texts[row] += text
                box.counts[row] += 1
            else:
                sequence.turn, sequence.row = box.turn, len(box.texts)
                box.seq_ids.append(seq_id)
                box.first_index.append(index)
                box.counts.append(1)
                box.texts.append(text)
        self.counts.output_tokens += taken
        for seq_id in unpack_u64(batch.accepted[: len(batch.accepted) & ~7]):
            if (accepted := find(seq_id)) is not None:
                accepted.box.accepted.append(seq_id)
        for finished in batch.finished:
            lane.leaving.pop(finished.seq_id, None)
            self._end(finished, lane)

    def _unplaced(self, seq_id: int, lane: Lane) -> None:
        """A token of what has ended, or of what another scheduler goes on with: that is to end at this one."""
        self.counts.unknown_results += 1
        if seq_id in self._sequences and not lane.barred(seq_id):
            lane.moved.append(seq_id)

    def _take_slowly(self, sequence: Sequence, index: int, token: int) -> None:
        """A token that does not stand for itself: part of a character, a stop string, or at the end."""
        if sequence.reported is not None and sequence.reported.lacks(index + 1):
            self._lost(sequence, f"the log-probabilities of output token {index} were lost")
            return
        if sequence.ending is not None:
            sequence.ending.append(token)
            return
        if sequence.request.search is not None:
            return  # its end comes with what follows
        if (ended := sequence.take(index, token)) is not None:
            self.lanes.put(sequence, Stop(sequence.seq_id))
            self._finish(sequence, *ended)
        elif sequence.matcher is None and not (sequence.skip_tokens or sequence.watched):
            sequence.fast = sequence.detokenizer.table()

    def _end(self, finished: Finished, lane: Lane) -> None:
        """The scheduler's terminal. The token that ended the sequence is counted, but is no text."""
        sequence = lane.sequences.get(finished.seq_id)
        if sequence is None:
            return  # ended here before, or another scheduler goes on with it
        if (search := sequence.request.search) is not None:
            self._step(search, sequence, finished, lane)
            return
        hidden = finished.stop_token
        if sequence.request.submit.include_stop and hidden not in self.vocabulary.special:
            hidden = NO_TOKEN
        sequence.cached = finished.cached_tokens if sequence.cached < 0 else sequence.cached
        ended = sequence.take_last(hidden)
        if (
            ended is None
            and finished.reason is FinishReason.LENGTH
            and (more := sequence.more(self.vocabulary)) is not None
        ):
            ended = sequence.write(more)
            if ended is None and len(sequence.output) < sequence.request.sampling.max_tokens:
                self.lanes.go_on(sequence)
                return
        ended = ended or sequence.end(finished.reason)
        self._finish(sequence, *ended, finished=finished if ended.reason is finished.reason else NOT_FINISHED)

    def _step(self, search: Search, sequence: Sequence, finished: Finished, lane: Lane) -> None:
        """A beam has its next token."""
        reason = finished.reason if sequence.output else FinishReason.ERROR
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._finish(sequence, reason, finished=finished)
        elif (batch := search.advance(sequence, self.lanes, lane, self.vocabulary)) is not None:
            self.take(batch, lane.instance)

    def _lost(self, sequence: Sequence, message: str) -> None:
        self.lanes.put(sequence, Abort(sequence.seq_id))
        self._finish(sequence, FinishReason.ERROR, message=message)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        output_tokens: int = -1,
        stop_string: str = "",
        message: str = "",
        finished: Finished = NOT_FINISHED,
    ) -> None:
        """The one terminal. `finished` is the scheduler's, if it came."""
        request = sequence.request
        self.counts.cached_tokens += max(sequence.cached, 0)
        reasoning = self.formats.reasoning_tokens(request.submit, request.format, sequence.output)
        if message:
            finished = msgspec.structs.replace(finished, message=message)
        sequence.box.finished.append(terminal(sequence, reason, output_tokens, stop_string, finished, reasoning))
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        self.lanes.forget(sequence)
        request = sequence.request
        request.live -= 1
        if not request.live:
            self.open_requests -= 1

    def drop(self, key: BoxKey) -> None:
        """An API process has gone: nobody waits for its sequences."""
        box = self.boxes.pop(key, None)
        for sequence in list(self._sequences.values()):
            if sequence.box is box:
                if sequence.request.admitted:
                    self.lanes.put(sequence, Abort(sequence.seq_id))
                self._forget(sequence)

    def flush(self, send: Callable[[int, msgspec.Struct], bool]) -> bool:
        """Sends everything that waits, `send` to an API process; False when something had to stay."""
        sent = [box.flush(send) for box in self.boxes.values()]
        return self.lanes.flush() and all(sent)

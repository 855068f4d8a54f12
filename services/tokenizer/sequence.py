"""The state of open requests and their sequences. Plain records: the Streams own and change them."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from common.logprobs import Report
from common.protocol import Admit, Finished, FinishReason, Submit, TextFinished, TextFormat
from common.vocabulary import Vocabulary
from services.tokenizer.beams import Search
from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.outbox import Outbox
from services.tokenizer.repetition import repeats
from services.tokenizer.reports import Reported
from services.tokenizer.stop import StopMatcher
from services.tokenizer.thinking import Thinking

if TYPE_CHECKING:
    from services.tokenizer.lanes import Lane

SEED_RANGE = 1 << 64


class Ended(NamedTuple):
    """Why a sequence ended here, and behind how many tokens."""

    reason: FinishReason
    tokens: int
    stop: str = ""


class Request:
    """What the choices of one Submit share."""

    __slots__ = (
        "admitted",
        "box",
        "format",
        "live",
        "readmitted",
        "sampling",
        "search",
        "submit",
        "thinking",
        "tokens",
    )

    def __init__(self, submit: Submit, box: Outbox) -> None:
        self.submit = submit
        self.box = box
        self.sampling = submit.sampling
        self.tokens: array[int] = array("i")  # the prompt, once it is encoded
        self.format: TextFormat | None = None  # as the API was told
        self.thinking: Thinking | None = None  # how much of it there may be
        self.search: Search | None = None  # while its beams run
        self.admitted = self.readmitted = False
        self.live = submit.n  # choices without a terminal

    def choices(self) -> range:
        """The seq_ids of all its choices."""
        return range(self.submit.seq_id, self.submit.seq_id + self.submit.n)


class Course:
    """What has happened to a sequence."""

    __slots__ = ("cached", "goes_on", "starved")

    def __init__(self) -> None:
        self.cached = -1  # tokens of its prompt that were when it began; -1: not known yet
        self.goes_on = False  # its reasoning has been ended, if it had to be
        self.starved = False  # it was taken from a scheduler that had lost its workers


class Sequence(Course):
    """One choice. `fast` mirrors its detokenizer's table, so that most tokens need no call.

    What another tokenizer has delivered before it died is made again, for the state, and skipped.
    """

    __slots__ = (
        *("box", "detokenizer", "ending", "fast", "lane", "matcher", "output", "request", "row", "seq_id"),
        *("reported", "skip_chars", "skip_tokens", "turn"),
    )

    def __init__(self, seq_id: int, request: Request, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.seq_id = seq_id
        self.request = request
        self.box = request.box
        self.output: array[int] = array("i")
        self.lane: Lane | None = None  # of the scheduler that has it
        self.turn = self.row = -1  # where its row is in the box, if the box is still at this turn
        self.ending: list[int] | None = None  # tokens that came together with its terminal
        self.matcher: StopMatcher | None = None
        wanted = request.submit.sampling.report
        self.reported = Reported(_of_choice(wanted, self), vocabulary) if wanted.asks else None
        self.skip_tokens, self.skip_chars = request.submit.delivered_tokens, request.submit.delivered_chars
        self.start(vocabulary, False)

    def start(self, vocabulary: Vocabulary, at_start: bool) -> None:
        submit = self.request.submit
        self.detokenizer = Detokenizer(vocabulary, submit.skip_special_tokens, at_start)
        self.fast = vocabulary.no_texts if self.skip_tokens else self.detokenizer.table()
        if self.watched:
            self.fast = vocabulary.no_texts
        if any(submit.stop):
            self.matcher = StopMatcher(submit.stop, submit.include_stop)
            self.fast = vocabulary.no_texts

    def restart(self, vocabulary: Vocabulary, top: int) -> None:
        """Without output, and with so many best tokens beside each one that is to come (-1: not even its own)."""
        self.output, self.ending, self.fast = array("i"), None, vocabulary.no_texts
        self.reported = Reported(Report(top), vocabulary) if top >= 0 else None

    @property
    def watched(self) -> bool:
        """Whether each of its rows is seen here, since more than text goes with it, or none does."""
        options = self.request.submit.options
        return options.token_ids or options.silent or options.repetition is not None or self.reported is not None

    def feed(self, token: int, shown: bool = True) -> str:
        """The text that its next token completes; not `shown`: it has none."""
        text = self.detokenizer.feed(token) if shown else ""
        if self.reported is not None:
            self.reported.place(token, text)
        return text

    def take(self, index: int, token: int, with_text: bool = True, last: bool = False) -> Ended | None:
        """Adds output token `index`, which is in `output`, and its text. What ended it: a stop string or, but for the
        last token, that it repeats itself."""
        stop = self._show(index, 1, self.feed(token, with_text))
        if stop is not None:
            return Ended(FinishReason.STOP_STRING, index + 1, stop)
        wanted = self.request.submit.options.repetition
        if wanted is None or last or index + 1 < self.request.sampling.min_tokens:
            return None
        return self.end(FinishReason.REPETITION, index + 1) if repeats(self.output, index + 1, wanted) else None

    def take_last(self, hidden: int) -> Ended | None:
        """The tokens that came with its terminal; `hidden` has no text as the last one."""
        for index, token in enumerate(tokens := self.ending or (), len(self.output) - len(tokens)):
            last = index == len(self.output) - 1
            if (ended := self.take(index, token, not (last and token == hidden), last)) is not None:
                return ended
        return None

    def end(self, reason: FinishReason, count: int = -1) -> Ended:
        """Adds what was held back, which may be a stop string; `count` -1: behind all tokens."""
        count = len(self.output) if count < 0 else count
        rest = self.detokenizer.flush()
        if rest and (stop := self._show(count, 0, rest)) is not None:
            return Ended(FinishReason.STOP_STRING, count, stop)
        if self.matcher is not None and (held := self.matcher.flush()):
            self.add_row(count, 0, held)
        return Ended(reason, count)

    def more(self, vocabulary: Vocabulary) -> tuple[int, ...] | None:
        """What to write before it goes on, if only the part that may be reasoning has ended by its length."""
        request = self.request
        if request.thinking is None or self.goes_on:
            return None
        return request.thinking.left(self.output, request.sampling.max_tokens, vocabulary)

    def write(self, tokens: tuple[int, ...]) -> Ended | None:
        """Adds tokens that nobody has drawn, behind which it goes on."""
        self.goes_on, self.ending = True, None
        for token in tokens:
            self.output.append(token)
            if self.reported is not None:
                self.reported.write(token)
            if (ended := self.take(len(self.output) - 1, token)) is not None:
                return ended
        return None

    def _show(self, index: int, count: int, text: str) -> str | None:
        """Adds the text of output tokens index .. index + count - 1, but what may become a stop string; or the one that
        ended it."""
        stop = None
        if self.matcher is not None:
            text, stop = self.matcher.feed(text, index + count >= self.request.sampling.min_tokens)
        self.add_row(index, count, text)
        return stop

    def add_row(self, index: int, count: int, text: str) -> None:
        """Text of output tokens index .. index + count - 1, into this sequence's row of the batch being filled."""
        if self.request.submit.options.silent:
            return
        if self.skip_tokens:
            index, count, text = self._undelivered(index, count, text)
            if not count and not text:
                return
        box = self.box
        if self.request.submit.options.token_ids and count:
            begin = box.ids.get(self.seq_id, (index,))[0]
            box.ids[self.seq_id] = begin, self.output[begin : index + count].tobytes()
        if self.reported is not None and count:
            self._report(index, count)
        if self.turn == box.turn:
            box.texts[self.row] += text
            box.counts[self.row] += count
            return
        self.turn, self.row = box.turn, len(box.texts)
        box.seq_ids.append(self.seq_id)
        box.first_index.append(index)
        box.counts.append(count)
        box.texts.append(text)

    def _report(self, index: int, count: int) -> None:
        assert self.reported is not None
        begin = self.box.logprobs[self.seq_id].first if self.seq_id in self.box.logprobs else index
        if (told := self.reported.output(begin, index + count - begin)) is not None:
            self.box.logprobs[self.seq_id] = told

    def _undelivered(self, index: int, count: int, text: str) -> tuple[int, int, str]:
        """What of a row the API does not have yet."""
        end, begin = index + count, max(index, self.skip_tokens)
        skipped = min(self.skip_chars, len(text))
        self.skip_chars -= skipped
        if end >= self.skip_tokens and not self.skip_chars:
            self.skip_tokens = 0
        return begin, max(end - begin, 0), text[skipped:]


def _of_choice(wanted: Report, sequence: Sequence) -> Report:
    """The first choice of a request tells of its prompt, for all."""
    first = sequence.seq_id == sequence.request.submit.seq_id
    return wanted if first else msgspec.structs.replace(wanted, prompt=-1)


def first_admission(request: Request) -> Admit:
    """All choices of a request that no scheduler has seen, or the first beam."""
    submit, sampling = request.submit, request.sampling
    if request.search is not None:
        return request.search.admission(0, False)
    return Admit(
        submit.seq_id,
        request.tokens.tobytes(),
        sampling if request.thinking is None else request.thinking.first(sampling),
        submit.n,
        submit.priority,
        submit.cache_salt,
        tenant=submit.tenant,
        weight=submit.weight,
        trace=submit.trace,
    )


def admission(sequence: Sequence, again: bool = True) -> Admit:
    """This choice by itself with its output so far, for a scheduler that does not know it (any more)."""
    request = sequence.request
    submit = request.submit
    request.readmitted |= again
    if request.search is not None:
        return request.search.admission(sequence.seq_id - submit.seq_id, again)
    seed = (request.sampling.seed + sequence.seq_id - submit.seq_id) % SEED_RANGE
    sampling, reported = msgspec.structs.replace(request.sampling, seed=seed), sequence.reported
    if request.thinking is not None and not sequence.goes_on:
        sampling = request.thinking.first(sampling)
    if reported is not None:
        sampling = msgspec.structs.replace(sampling, report=reported.left(len(request.tokens)))
    return Admit(
        sequence.seq_id,
        request.tokens.tobytes(),
        sampling,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        output=sequence.output.tobytes(),
        origin=submit.origin,
        again=again,
        tenant=submit.tenant,
        weight=submit.weight,
        trace=submit.trace,
        logprobs=b"" if reported is None else reported.of_output(len(sequence.output)),
    )


def terminal(
    sequence: Sequence, reason: FinishReason, output_tokens: int, stop_string: str, finished: Finished, reasoning: int
) -> TextFinished:
    """What the API is told of its end; `output_tokens` -1: all that have come."""
    count = len(sequence.output) if output_tokens < 0 else output_tokens
    return TextFinished(
        sequence.seq_id,
        reason,
        len(sequence.request.tokens),
        0 if sequence.request.submit.options.silent else count,
        max(sequence.cached, 0),
        finished.stop_token,
        stop_string,
        finished.message,
        finished.code,
        reasoning,
    )

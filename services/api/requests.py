"""Open requests: their choices, what has come of each, and who reads it. Plain records that the hub changes."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from common.dialects.events import Event
from common.errors import Reject
from common.membership import MOST_SCHEDULERS
from common.protocol import FinishReason, Peer, Submit, TextBatch, TextFinished, TextFormat
from common.recorder import Kind, Record, unrecorded
from services.api.answer import Answer, Wanted
from services.api.figures import Figures
from services.api.logprobs import Form, Reported

WORDS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.REPETITION: "repetition",
}
NOBODY = Peer("tokenizer", 0, 0, "")  # has the choices that wait for a tokenizer


class Consumer(Protocol):
    """The reader of one request, called after each batch that changed it."""

    def update(self) -> None: ...
    def keep_alive(self) -> None: ...


class Course:
    """Who computes a choice, and when its rows came."""

    __slots__ = ("begun_s", "engine", "last_s")

    def __init__(self) -> None:
        self.begun_s = self.last_s = 0.0  # times of its first and newest row
        self.engine = 0  # instance of the scheduler that has it

    def starts(self, now_s: float) -> None:
        self.begun_s = now_s

    def leaves(self) -> None:
        """Its next tokenizer tells if another scheduler than the first one has it."""
        self.engine = 0


class Choice(Course):
    """One sequence of a request. `parts` is the text that its consumer has not taken yet, one entry per row."""

    __slots__ = (
        *("accepted", "answer", "finished", "first", "index", "lost_s", "origin", "parts", "received"),
        *("request", "seq_id", "submit", "taken_chars", "tokenizer"),
    )

    def __init__(self, request: "Request", seq_id: int, first: int, tokenizer: int, submit: Submit) -> None:
        super().__init__()
        self.request, self.seq_id, self.tokenizer = request, seq_id, tokenizer
        self.submit = submit  # its prompt's
        self.origin = seq_id  # stays when the choice moves to another tokenizer
        self.first = first  # origin of the first choice of the same prompt
        self.index = len(request.choices)
        self.accepted = False  # the scheduler has said that it will not refuse it
        self.received = 0  # output tokens
        self.taken_chars = 0  # of their text, by the consumer
        self.lost_s = 0.0  # since when it waits for a tokenizer
        self.parts: list[str] = []
        if submit.sampling.report.asks:
            request.reports[self.index] = Reported(submit.sampling.report)
        self.answer: Answer | None = None  # what there is besides text, once the tokenizer has told of any
        self.finished: TextFinished | None = None

    @property
    def waits(self) -> bool:
        """For a tokenizer."""
        return self.finished is None and self.tokenizer == NOBODY.incarnation

    @property
    def together(self) -> "list[Choice]":
        """Those that another tokenizer takes over with it: all beams of a search, which begins anew."""
        if self.submit.options.beams is None:
            return [self]
        return [same for same in self.request.choices if same.first == self.first]

    @property
    def moved(self) -> bool:
        """Another tokenizer has taken it over, alone."""
        return self.seq_id != self.origin

    def again(self, seq_id: int) -> Submit:
        """All that another tokenizer needs to go on with this choice alone."""
        sampling = self.submit.sampling
        if self.submit.options.beams is not None:
            return msgspec.structs.replace(self.submit, seq_id=seq_id)
        seed = (sampling.seed + self.origin - self.first) % 2**64
        report = self.reported.left() if self.reported is not None else sampling.report
        return msgspec.structs.replace(
            self.submit,
            seq_id=seq_id,
            sampling=msgspec.structs.replace(sampling, seed=seed, report=report),
            n=1,
            origin=self.origin,
            delivered_tokens=self.received,
            delivered_chars=self.taken_chars + sum(map(len, self.parts)),
        )

    def begin(self, figures: Figures, now_s: float) -> None:
        """Its first token has come."""
        self.starts(now_s)
        figures.at(self.engine).first_token.add(now_s - self.request.opened_s)
        self.request.record(Kind.FIRST_TEXT, self.seq_id)

    def measure(self, figures: Figures, finished: TextFinished, now_s: float) -> None:
        """What its end tells that came from its scheduler."""
        sampling, request, engine = self.submit.sampling, self.request, figures.at(self.engine)
        if self.origin == self.first:
            figures.prompt_tokens += finished.prompt_tokens
            figures.cached_tokens += finished.cached_tokens
            engine.prompt_size.add(finished.prompt_tokens)
            engine.choices.add(self.submit.n)
            if sampling.max_tokens:
                engine.max_tokens.add(sampling.max_tokens)
        engine.output_size.add(finished.output_tokens)
        engine.request.add(now_s - request.opened_s)
        if self.received > 1:
            engine.per_token.add((self.last_s - self.begun_s) / (self.received - 1))
        if request.open == 1:
            engine.longest_output.add(max(each.received for each in request.choices))

    def wait(self, lost_s: float) -> None:
        """For a tokenizer."""
        self.tokenizer, self.lost_s = NOBODY.incarnation, lost_s
        self.request.record(Kind.WAITING, self.seq_id)

    def move(self, seq_id: int, tokenizer: int) -> None:
        self.request.record(Kind.MOVED, seq_id, self.origin)
        if self.submit.options.beams is not None:
            self.first += seq_id - self.origin
            self.origin = seq_id
        self.seq_id, self.tokenizer = seq_id, tokenizer
        self.leaves()

    def end(self, finished: TextFinished) -> None:
        """`received` may be less than the terminal counts: then the end came from here."""
        self.finished = finished
        self.request.record(Kind.ANSWERED, self.seq_id, self.received, finished.cached_tokens, finished.reason)

    def read_as(self, told: TextFormat) -> None:
        """The text is written so. Known from the first tokenizer that had it: another one tells the same."""
        if self.answer is None:
            self.answer = Answer(told, self.request.wanted)

    @property
    def echo(self) -> str:
        """What its client gets before the text."""
        return self.request.echoes[self.index // self.submit.n] if self.request.echoes else ""

    @property
    def reported(self) -> Reported | None:
        """Its log-probabilities, if it wants any."""
        return self.request.reports.get(self.index)

    @property
    def reads(self) -> bool:
        """Whether `read` tells its text, else `take`."""
        return self.answer is not None and self.answer.reads

    @property
    def word(self) -> str:
        """Why it has ended, in OpenAI's words."""
        assert self.finished is not None
        word = WORDS[self.finished.reason]
        return "tool_calls" if word == "stop" and self.answer is not None and self.answer.calls else word

    def read(self) -> list[Event]:
        """What the text since the last call says, where it is read."""
        assert self.answer is not None
        events = self.answer.feed(self.take())
        return events + self.answer.finish() if self.finished is not None else events

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self.parts)
        self.taken_chars += len(text)
        self.parts.clear()
        return text


class Request:
    """One HTTP request: choices in order, those with news in `updated`, and why it failed if it did."""

    __slots__ = (
        *("changed", "choices", "consumer", "failure", "heard_s", "limit", "open", "opened_s", "paused", "record"),
        *("echoes", "form", "reports", "updated", "wanted"),
    )

    def __init__(self, opened_s: float, limit: int) -> None:
        self.record: Record = unrecorded
        self.opened_s = self.heard_s = opened_s
        self.limit = limit  # rows that may wait for the client before it is paused; 0: all of them may
        self.paused = False
        self.choices: list[Choice] = []
        self.updated: list[Choice] = []
        self.open = 0  # choices without a terminal
        self.failure: Reject | None = None
        self.changed = False
        self.consumer: Consumer | None = None
        self.wanted: Wanted | None = None  # of a chat
        self.echoes: Sequence[str] = ()  # by prompt
        self.form = Form()
        self.reports: dict[int, Reported] = {}  # by choice

    def called(self, name: str, tenant: str) -> bool:
        """Whether it is this tenant's request of that name, which may have a prefix of ours."""
        own = self.form.name
        names = own, f"chatcmpl-{own}", f"cmpl-{own}"
        return name in names and self.choices[0].submit.tenant == tenant

    @property
    def accepted(self) -> bool:
        """None of its prompts can be refused any more."""
        return all(c.accepted or c.received or c.finished for c in self.choices if c.origin == c.first)


def take_extras(choices: dict[int, Choice], batch: TextBatch) -> int:
    """What a batch has besides text: how answers are written, which comes before their text, ids, log-probabilities,
    and who computes. Returns how much of it is nonsense."""
    for seq_id, engine in batch.engines.items():
        if (choice := choices.get(seq_id)) is not None and 0 <= engine < MOST_SCHEDULERS:
            choice.engine = engine
    for told in batch.formats:
        if (choice := choices.get(told.seq_id)) is not None:
            together = [same for same in choice.request.choices if same.first == choice.first and not same.moved]
            for same in [choice] if choice.moved else together:
                same.read_as(told)
    for seq_id, (first, tokens) in batch.ids.items():
        if (choice := choices.get(seq_id)) is not None and choice.answer is not None and not len(tokens) % 4:
            choice.answer.add_ids(first, tokens)
    wrong = 0
    for seq_id, logprobs in batch.logprobs.items():
        if (choice := choices.get(seq_id)) is not None:
            wrong += choice.reported is None or not choice.reported.add(logprobs)
    for seq_id, logprobs in batch.prompt_logprobs.items():
        if (choice := choices.get(seq_id)) is not None:
            wrong += choice.reported is None or not choice.reported.add_prompt(logprobs)
    return wrong

"""Log-probabilities in OpenAI's two forms and in vLLM's of prompts, made from a choice's reports. Pure."""

from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from itertools import accumulate

import msgspec
from msgspec import UNSET, UnsetType

from services.api.logprobs import LEAST, Entry, TokenReport
from services.api.requests import Choice, Request

Utf8 = getincrementaldecoder("utf-8")


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Column j is token j. The first of a prompt follows nothing: it has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id


def _shown(entry: Entry, as_ids: bool) -> str:
    return f"token_id:{entry.token}" if as_ids else entry.piece.decode("utf-8", "replace")


def _name(entry: Entry, as_ids: bool) -> str:
    """As a key: unlike bytes have unlike names, also where they are no whole character."""
    if as_ids:
        return _shown(entry, True)
    try:
        return entry.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.piece)


def _with_own_first(report: TokenReport) -> tuple[Entry, ...]:
    """Each token once, as vLLM orders them."""
    return report.own, *(each for each in report.best if each.token != report.own.token)


def chat_logprobs(reports: list[TokenReport], as_ids: bool = False) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                _shown(own, as_ids),
                own.logprob,
                list(own.piece),
                [TopLogprob(_shown(each, as_ids), each.logprob, list(each.piece)) for each in best],
            )
            for own, best, _, _ in reports
        ]
    )


def writing(tokens: list[ContentLogprob], text: str) -> tuple[list[ContentLogprob], list[ContentLogprob]]:
    """Those that write a part of an answer, and those behind it; what is before them is left out.

    All of them, where they do not say the text: with one that is not shown, or bytes that are no character.
    """
    ends = list(accumulate(len(token.bytes) for token in tokens))
    begin = b"".join(bytes(token.bytes) for token in tokens).find(text.encode())
    if begin < 0:
        return tokens, []
    end = begin + len(text.encode())
    last = bisect_left(ends, end) + 1
    return tokens[bisect_right(ends, begin) : last], tokens[last:]


class Writing:
    """The same of a text that grows, as far as it has come. Its first piece is what the newest tokens write."""

    __slots__ = ("_end", "_ends", "_spelled", "_told")

    def __init__(self) -> None:
        self._spelled, self._ends = bytearray(), list[int]()
        self._end, self._told = -1, 0  # bytes up to the text's end; tokens told or left out

    def more(self, tokens: list[ContentLogprob], piece: str) -> list[ContentLogprob]:
        """`tokens`: all so far; returns those that write the text's next piece."""
        for token in tokens[len(self._ends) :]:
            self._spelled += bytes(token.bytes)
            self._ends.append(len(self._spelled))
        content = piece.encode()
        if self._end < 0:
            begin = self._spelled.rfind(content)
            if begin < 0:
                return []
            self._end, self._told = begin, bisect_right(self._ends, begin)
        self._end += len(content)
        last = bisect_left(self._ends, self._end) + 1
        new, self._told = tokens[self._told : last], max(last, self._told)
        return new


def _by_name(report: TokenReport, as_ids: bool) -> dict[str, float]:
    """The token itself and the ones beside it; of two with equal bytes the second is named by its id."""
    found: dict[str, float] = {}
    for entry in _with_own_first(report):
        name = _name(entry, as_ids)
        found[name if name not in found else _shown(entry, True)] = entry.logprob
    return found


def text_logprobs(
    reports: list[TokenReport], before: int = 0, prompt: TextLogprobs | None = None, as_ids: bool = False
) -> TextLogprobs:
    """`before`: characters before the output's text; `prompt`: what stands before these."""
    columns = prompt or TextLogprobs([], [], [], [])
    return TextLogprobs(
        columns.tokens + [_name(report.own, as_ids) for report in reports],
        columns.token_logprobs + [report.own.logprob for report in reports],
        columns.top_logprobs + [_by_name(report, as_ids) for report in reports],
        columns.text_offset + [before + report.offset for report in reports],
    )


def echoed(
    lead: bytes, reports: list[TokenReport], echo: str, as_ids: bool = False, lead_token: int = -1
) -> TextLogprobs:
    """The prompt's own, `lead` being its first token, as part of what is echoed."""
    pieces = [lead, *(report.own.piece for report in reports)]
    offsets, decoder, at = [], Utf8("replace"), 0
    for place, piece in enumerate(pieces):
        offsets.append(min(at, len(echo)))
        if place or echo.startswith(piece.decode("utf-8", "replace")):  # else the tokenizer has put it there
            at += len(decoder.decode(piece))
    names = text_logprobs(reports, as_ids=as_ids)
    first = _name(Entry(lead_token, lead, LEAST), as_ids)
    return TextLogprobs([first, *names.tokens], [None, *names.token_logprobs], [None, *names.top_logprobs], offsets)


def prompt_logprobs(reports: list[TokenReport], top: int) -> PromptLogprobs:
    """vLLM's form: the best tokens and the prompt's own by id, none for its first one."""

    def one(entry: Entry, rank: int) -> PromptLogprob:
        return PromptLogprob(entry.logprob, rank, entry.piece.decode("utf-8", "replace"))

    return [
        None,
        *(
            {str(best.token): one(best, rank) for rank, best in enumerate(report.best[:top], 1)}
            | {str(report.own.token): one(report.own, report.rank)}
            for report in reports
        ),
    ]


def prompt_logprobs_of(choice: Choice) -> PromptLogprobs | UnsetType:
    """Of the choice's prompt, where the request wants them in this form."""
    first, top = _first_of(choice).reported, choice.request.form.prompt
    return UNSET if first is None or top < 0 else prompt_logprobs(first.prompt, top)


def _first_of(choice: Choice) -> Choice:
    """The choice of the same prompt that tells of it."""
    return choice.request.choices[choice.index - choice.index % choice.submit.n]


def content_of(choice: Choice) -> ChatLogprobs | None:
    """Of the tokens since the last call; None if there are none or nobody wants them."""
    reported = choice.reported
    if reported is None or reported.wanted.top < 0 or not (reports := reported.take()):
        return None
    if reported.wanted.named:  # the token itself is one of them
        reports = [report._replace(best=_with_own_first(report)) for report in reports]
    return chat_logprobs(reports, choice.request.form.as_ids)


def columns_of(choice: Choice) -> TextLogprobs | None:
    """Likewise of a completion. What is echoed comes with the first ones."""
    reported, form = choice.reported, choice.request.form
    if reported is None or reported.wanted.top < 0 or not form.shown:
        return None
    prompt, first = None, _first_of(choice)
    if choice.request.echoes and first.reported is not None and first.reported.wanted.prompt >= 0:
        if not (first.reported.output or first.finished):
            return None  # those of the prompt are still on their way
        if not reported.begun:
            parts = [part._replace(best=part.best[: form.echoed]) for part in first.reported.prompt]
            prompt = echoed(first.reported.lead, parts, choice.echo, form.as_ids, first.reported.lead_token)
    reports = reported.take()
    return text_logprobs(reports, len(choice.echo), prompt, form.as_ids) if reports or prompt else None


def chosen(request: Request) -> list[Choice]:
    """The choices that are shown: all, or of each prompt the most probable ones by the mean of their tokens."""
    best = request.form.best
    if not best:
        return request.choices

    def mean(choice: Choice) -> float:
        reports = choice.reported.output if choice.reported is not None else []
        return sum(report.own.logprob for report in reports) / max(len(reports), 1)

    n = request.choices[0].submit.n
    prompts = (request.choices[at : at + n] for at in range(0, len(request.choices), n))
    ordered = request.form.ordered
    return [each for some in prompts for each in (some if ordered else sorted(some, key=mean, reverse=True))[:best]]

"""Log-probabilities of one choice, as the tokenizer told them, for whichever reply wants them. Pure.

Owned by its Choice: a report per output token that has been received, and, for the first choice of a prompt, one per
token of it but the first. `take` gives each once, so that what a stream says joined is what a whole reply says.
"""

from typing import NamedTuple

from common.columns import unpack_i32
from common.logprobs import Report, TextLogprobs, record_bytes

LEAST = -9999.0  # of what cannot come: JSON has no infinity


class Entry(NamedTuple):
    token: int
    piece: bytes  # UTF-8, possibly a part of a character
    logprob: float


class TokenReport(NamedTuple):
    own: Entry
    best: tuple[Entry, ...]
    rank: int
    offset: int  # characters of the output's text before it


class Form(NamedTuple):
    """How a request wants to be told."""

    as_ids: bool = False  # tokens are named by their ids
    prompt: int = -1  # so many best ones of each token of the prompt, in vLLM's form
    name: str = ""  # by which it can be aborted
    shown: bool = True  # those of the output; not where they only serve to choose
    echoed: int = 0  # so many best ones beside each token of an echoed prompt
    best: int = 0  # so many choices of each prompt are shown, the most probable ones; 0: all
    ordered: bool = False  # they come in that order


class Reported:
    __slots__ = ("_taken", "begun", "lead", "lead_token", "output", "prompt", "wanted")

    def __init__(self, wanted: Report) -> None:
        self.wanted = wanted
        self.output: list[TokenReport] = []
        self.prompt: list[TokenReport] = []
        self.lead, self.lead_token = b"", -1  # the prompt's first token
        self.begun = False  # the consumer has taken some
        self._taken = 0  # of the output, by it

    def add(self, told: TextLogprobs) -> bool:
        """More of the output; repeats are left out. False: these are none, or not the next ones."""
        return _extend(self.output, told, told.first, self.wanted.top)

    def add_prompt(self, told: TextLogprobs) -> bool:
        """More of the prompt, likewise."""
        if told.first == 1:
            self.lead, self.lead_token = told.lead, told.lead_token
        return _extend(self.prompt, told, told.first - 1, self.wanted.prompt)

    @property
    def waiting(self) -> bool:
        """Whether `take` would give something."""
        return self._taken < len(self.output)

    def take(self) -> list[TokenReport]:
        """The output's since the last call."""
        taken, self._taken, self.begun = self.output[self._taken :], len(self.output), True
        return taken

    def left(self) -> Report:
        """What another tokenizer is to report: a prompt's are whole before the first token."""
        return Report(self.wanted.top, named=self.wanted.named) if self.output else self.wanted


def _extend(known: list[TokenReport], told: TextLogprobs, first: int, top: int) -> bool:
    width, entries = record_bytes(top), 1 + top
    count, rest = divmod(len(told.records), width) if width else (0, 1)
    if rest or not 0 <= first <= len(known) or len(told.pieces) != count * entries:
        return False
    if told.offsets and len(told.offsets) != 4 * count:
        return False
    numbers, values = unpack_i32(told.records), memoryview(told.records).cast("f")
    offsets = unpack_i32(told.offsets).tolist() if told.offsets else [0] * count
    for record in range(len(known) - first, count):
        begin = record * width // 4
        middle = begin + 1 + entries
        ids, logprobs = numbers[begin + 1 : middle], values[middle : middle + entries]
        pieces = told.pieces[record * entries : (record + 1) * entries]
        own, *best = [
            Entry(token, piece, value if value > LEAST else LEAST)
            for token, piece, value in zip(ids, pieces, logprobs, strict=True)
        ]
        known.append(TokenReport(own, tuple(each for each in best if each.token >= 0), numbers[begin], offsets[record]))
    return True

"""Log-probabilities of one sequence on their way from its scheduler to its API: ids get their text, tokens their place.

Owned by its Sequence. `add` takes what a scheduler sends, repeats included; `output` and `prompt` give what goes on.
All records are kept while the sequence is open: another scheduler is given those of its output, and asked for a
prompt's as long as they are not whole.
"""

from array import array
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from common.columns import unpack_i32
from common.errors import Reject, RejectReason
from common.logprobs import Report, TextLogprobs, TokenLogprobs, record_bytes
from common.vocabulary import Vocabulary

if TYPE_CHECKING:
    from services.tokenizer.sequence import Sequence

LEAST = float("-inf")
MOST_ENTRIES = 1 << 20  # of a prompt's log-probabilities: they are kept until the answer is whole


def check_report(num_prompt: int, wanted: Report) -> None:
    """Raises Reject for a prompt that is too long for what it asks for."""
    if num_prompt * (1 + wanted.prompt) > MOST_ENTRIES:
        text = f"{1 + wanted.prompt} log-probabilities for each of {num_prompt} tokens are more than {MOST_ENTRIES}"
        raise Reject(RejectReason.INVALID, text, "prompt_logprobs")


class Reported:
    __slots__ = ("_output", "_prompt", "_told_prompt", "_vocabulary", "chars", "offsets", "wanted")

    def __init__(self, wanted: Report, vocabulary: Vocabulary) -> None:
        self.wanted = wanted
        self.offsets = array("i")  # characters before each output token
        self.chars = 0  # of the text so far
        self._vocabulary = vocabulary
        self._output, self._prompt = bytearray(), bytearray()
        self._told_prompt = 0  # tokens of the prompt whose records went to the API

    def add(self, told: TokenLogprobs) -> bool:
        """False: something between these and the last ones was lost, or they are no records."""
        return _append(self._output, record_bytes(self.wanted.top), told.first, told.records) and _append(
            self._prompt, record_bytes(self.wanted.prompt), told.first_prompt - 1, told.prompt
        )

    def write(self, token: int) -> None:
        """The next output token, which nobody has drawn: sure, and without others."""
        if self.wanted.top >= 0:
            others = self.wanted.top
            self._output += array("i", [1, token, *[-1] * others]).tobytes()
            self._output += array("f", [0.0, *[LEAST] * others]).tobytes()

    def lacks(self, count: int) -> bool:
        """Whether one of the first `count` output tokens has no record."""
        return len(self._output) < count * record_bytes(self.wanted.top)

    def place(self, token: int, text: str) -> None:
        """The next output token completes this text, which may begin with what a cut character before it has become."""
        own = self._vocabulary.texts[token]
        before = len(text) - len(own) if own and text.endswith(own) else 0
        self.offsets.append(self.chars + before)
        self.chars += len(text)

    def output(self, first: int, count: int) -> TextLogprobs | None:
        """Of these output tokens, whose places are known."""
        if self.wanted.top < 0:
            return None
        width = record_bytes(self.wanted.top)
        records = bytes(self._output[first * width : (first + count) * width])
        offsets = self.offsets[first : first + count].tobytes()
        return TextLogprobs(first, records, self._pieces(records, self.wanted.top), offsets)

    def prompt(self, tokens: "array[int]") -> TextLogprobs | None:
        """Of the prompt, what has come since the last call; None if nothing has."""
        width = record_bytes(self.wanted.prompt)
        have = len(self._prompt) // width if width else 0
        if have == self._told_prompt:
            return None
        records = bytes(self._prompt[self._told_prompt * width :])
        pieces = self._pieces(records, self.wanted.prompt)
        lead = () if self._told_prompt else (b"", self._piece(tokens[0]), tokens[0])
        told = TextLogprobs(self._told_prompt + 1, records, pieces, *lead)
        self._told_prompt = have
        return told

    def left(self, num_prompt: int) -> Report:
        """What another scheduler is to report."""
        whole = len(self._prompt) == (num_prompt - 1) * record_bytes(self.wanted.prompt)
        return msgspec.structs.replace(self.wanted, prompt=-1) if whole else self.wanted

    def of_output(self, count: int) -> bytes:
        """Records of the first tokens, for another scheduler."""
        return bytes(self._output[: count * record_bytes(self.wanted.top)])

    def _pieces(self, records: bytes, top: int) -> list[bytes]:
        column, width = unpack_i32(records), record_bytes(top) // 4
        return [
            self._piece(token)
            for begin in range(0, len(column), width)
            for token in islice(column, begin + 1, begin + 2 + top)
        ]

    def _piece(self, token: int) -> bytes:
        return self._vocabulary.pieces[token] if 0 <= token < self._vocabulary.size else b""


def _append(known: bytearray, width: int, first: int, records: bytes) -> bool:
    """Adds the records that are not known yet. Those of a width of 0 are not wanted any more."""
    if not records or not width:
        return True
    have = len(known) // width
    if len(records) % width or not 0 <= first <= have:
        return False
    known += records[(have - first) * width :]
    return True


def take_reports(told: Mapping[int, TokenLogprobs], sequences: Mapping[int, "Sequence"]) -> list["Sequence"]:
    """Of a step's tokens, before them; they go to the API with these, but a prompt's go at once.

    Returns the sequences of which some are missing.
    """
    lost: list[Sequence] = []
    for seq_id, logprobs in told.items():
        sequence = sequences.get(seq_id)
        if sequence is None or sequence.reported is None:
            continue
        if not sequence.reported.add(logprobs):
            lost.append(sequence)
            continue
        prompt = sequence.reported.prompt(sequence.request.tokens)
        if prompt is not None:
            waiting = sequence.box.prompt_logprobs
            waiting[seq_id] = _joined(waiting[seq_id], prompt) if seq_id in waiting else prompt
    return lost


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """Two consecutive parts of a prompt."""
    return msgspec.structs.replace(first, records=first.records + second.records, pieces=first.pieces + second.pieces)

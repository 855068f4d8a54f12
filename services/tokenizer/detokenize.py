"""Turns one sequence's tokens into text as they come, never cutting a character. Pure.

A Detokenizer is owned by its sequence. Whatever the tokens are split into, the texts of all `feed` calls and of
`flush` joined are the text of all tokens at once: bytes that do not yet make a character wait, and become U+FFFD only
when a later byte or the end shows that they never will.
"""

from codecs import utf_8_decode

from common.vocabulary import Vocabulary, trim


class Detokenizer:
    __slots__ = ("_lead", "_pending", "_skip_special", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special: bool, at_start: bool = False) -> None:
        """`at_start`: no text comes before this one, so the tokenizer's own leading space is dropped."""
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._lead = vocabulary.lead_spaces if at_start else 0
        self._pending = b""

    def table(self) -> list[str | None]:
        """By token id: what `feed` would return now without a change of state, or None where it must be asked."""
        if self._pending or self._lead:
            return self._vocabulary.no_texts
        return self._vocabulary.texts_without_special if self._skip_special else self._vocabulary.texts

    def feed(self, token: int) -> str:
        """The text that this token completes, possibly empty. Raises IndexError outside the vocabulary."""
        if self._skip_special and token in self._vocabulary.special:
            return ""
        if not self._pending and not self._lead and (text := self._vocabulary.texts[token]) is not None:
            return text
        piece = self._pending + self._vocabulary.pieces[token]
        complete, used = utf_8_decode(piece, "replace", False)
        self._pending = piece[used:]
        return self._trimmed(complete)

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        if self._lead and text:
            text = trim(text, self._lead)
            self._lead = 0
        return text

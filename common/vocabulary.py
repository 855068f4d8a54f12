"""What each token id means as text: the tables that detokenization reads.

Built once from a `tokenizers.Tokenizer`; shared by every sequence and never written by them. Exact for tokenizers
whose text is the concatenation of their tokens' bytes (byte-level BPE, sentencepiece with or without byte fallback);
any other decoder is a ConfigError.
"""

import json
from collections.abc import Iterable
from copy import copy
from typing import Any

from tokenizers import Tokenizer

from common.errors import ConfigError

ALL_SPACES = 1 << 30


class _ByteAlphabet(dict[int, str]):
    """GPT-2's printable stand-ins for bytes, for `str.translate`: stand-in to the character with the byte's value."""

    def __missing__(self, code: int) -> str:
        raise ValueError(code)


def byte_alphabet() -> dict[int, str]:
    """Stand-in code point -> chr(byte). Printable Latin-1 stands for itself, other bytes for U+0100 upwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable} | {256 + place: chr(byte) for place, byte in enumerate(hidden)}
    return _ByteAlphabet(table)


class _Spelling:
    """How a tokenizer's decoder (its JSON form) turns one token string into bytes."""

    def __init__(self, decoder: dict[str, Any]) -> None:
        self.alphabet = byte_alphabet()
        self.byte_level = self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.lead_spaces = 0
        for step in decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]:
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self.replacements.append((step["replacement"], " "))
            if step.get("prepend_scheme", "always") != "never":
                self.lead_spaces = ALL_SPACES
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.lead_spaces = step["start"]
        elif kind != "Fuse":
            raise ConfigError(f"a tokenizer with the decoder {json.dumps(step)} is not supported")

    def bytes_of(self, token: str) -> bytes:
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # not a byte token after all
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_level:
            try:
                return token.translate(self.alphabet).encode("latin-1")
            except ValueError:
                pass  # an added token, written as itself
        return token.encode()


class Vocabulary:
    """Tables by token id, all of length `size`; ids without a token mean nothing and give an empty text."""

    def __init__(self, pieces: list[bytes], special: Iterable[int] = (), lead_spaces: int = 0) -> None:
        self.pieces = pieces  # UTF-8, possibly a part of a character
        self.special = frozenset(special)
        self.lead_spaces = lead_spaces  # spaces that decoding drops at the very beginning of a text
        self.texts = [_whole(piece) for piece in pieces]  # None where the piece is no whole text by itself
        self.texts_without_special = ["" if i in self.special else text for i, text in enumerate(self.texts)]
        self.no_texts: list[str | None] = [None] * len(pieces)
        self._views: list[Vocabulary] = []

    @property
    def size(self) -> int:
        return len(self.pieces)

    def widen(self, size: int) -> None:
        """Adds empty tokens up to `size`: a model's output layer is often padded beyond its vocabulary."""
        missing = size - len(self.pieces)
        if missing > 0:
            self.pieces += [b""] * missing
            self.texts += [""] * missing
            self.texts_without_special += [""] * missing
            self.no_texts += [None] * missing
            for view in self._views:
                view.texts_without_special += [""] * missing

    def showing(self, markers: frozenset[str]) -> "Vocabulary":
        """A view on these tables to which special tokens with such a text are ordinary ones."""
        shown = [token for token in self.special if self.texts[token] in markers]
        if not shown:
            return self
        view = copy(self)
        view.special = self.special.difference(shown)
        view.texts_without_special = list(self.texts_without_special)
        for token in shown:
            view.texts_without_special[token] = self.texts[token]
        self._views.append(view)
        return view

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of all tokens at once, special ones included. Raises IndexError outside the vocabulary."""
        text = b"".join([self.pieces[token] for token in tokens]).decode("utf-8", "replace")
        return trim(text, self.lead_spaces)


def trim(text: str, spaces: int) -> str:
    """The text without up to `spaces` spaces at its beginning."""
    present = len(text) - len(text.lstrip(" "))
    return text[min(present, spaces) :]


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def build(tokenizer: Tokenizer) -> Vocabulary:
    """The tables of a tokenizer. Raises ConfigError if its decoder is not a concatenation of tokens."""
    if tokenizer.decoder is None:
        raise ConfigError("the tokenizer has no decoder, so its tokens cannot be turned into text")
    spelling = _Spelling(json.loads(tokenizer.decoder.__getstate__()))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        pieces[token_id] = spelling.bytes_of(token)
    special = [token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    return Vocabulary(pieces, special, spelling.lead_spaces)

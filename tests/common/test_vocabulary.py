import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from common import vocabulary
from common.errors import ConfigError
from common.vocabulary import ALL_SPACES, Vocabulary, byte_alphabet, trim


def word_tokenizer(*tokens: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token=tokens[0]))


def test_alphabet_names_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == [chr(byte) for byte in range(256)]
    assert alphabet[ord("Ġ")] == " " and alphabet[ord("Ċ")] == "\n" and alphabet[ord("a")] == "a"


def test_byte_level_pieces_and_special_tokens() -> None:
    tokenizer = word_tokenizer("<s>", "Ġhi", "Ã", "©", "plain text")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    words = vocabulary.build(tokenizer)
    assert words.pieces == [b"<s>", b" hi", b"\xc3", b"\xa9", b"plain text"]
    assert words.texts == ["<s>", " hi", None, None, "plain text"]
    assert words.texts_without_special == ["", " hi", None, None, "plain text"]
    assert words.decode([0, 1, 2, 3]) == "<s> hié"


def test_sentencepiece_pieces() -> None:
    tokenizer = word_tokenizer("<unk>", "▁the", "<0xE2>", "<0xZZ>", "▁▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = vocabulary.build(tokenizer)
    assert words.pieces == [b"<unk>", b" the", b"\xe2", b"<0xZZ>", b"  "]
    assert words.lead_spaces == 1
    assert words.decode([1, 1]) == "the the"


def test_metaspace_drops_the_leading_mark_unless_it_never_wrote_one() -> None:
    tokenizer = word_tokenizer("▁the")
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    assert vocabulary.build(tokenizer).lead_spaces == ALL_SPACES
    tokenizer.decoder = decoders.Metaspace("▁", "never")
    assert vocabulary.build(tokenizer).decode([0]) == " the"


def test_unknown_decoders_are_refused_by_name() -> None:
    tokenizer = word_tokenizer("a")
    with pytest.raises(ConfigError, match="no decoder"):
        vocabulary.build(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        vocabulary.build(tokenizer)


def test_widen_adds_silent_tokens_to_every_table() -> None:
    words = Vocabulary([b"a"], special=[0])
    texts, no_texts = words.texts, words.no_texts
    words.widen(3)
    words.widen(2)
    assert words.size == 3 and texts == ["a", "", ""] and no_texts == [None] * 3
    assert words.texts_without_special == ["", "", ""]
    assert words.decode([0, 2]) == "a"


def test_trim_takes_at_most_so_many_spaces() -> None:
    assert trim("  a ", 1) == " a "
    assert trim("  a ", ALL_SPACES) == "a "
    assert trim("a", 1) == "a"


@given(st.text(max_size=40))
def test_decode_equals_the_library(text: str) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0}, merges=[]))
    alphabet = {byte: chr(code) for code, byte in byte_alphabet().items()}
    vocab = {alphabet[chr(byte)]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    words = vocabulary.build(tokenizer)
    ids = list(text.encode())
    assert words.decode(ids) == tokenizer.decode(ids) == text
    assert words.decode(ids[1:]) == tokenizer.decode(ids[1:])
    assert json.loads(tokenizer.decoder.__getstate__())["type"] == "ByteLevel"

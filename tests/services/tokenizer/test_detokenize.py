from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common import gguf_tokenizer, vocabulary
from common.vocabulary import ALL_SPACES, Vocabulary
from services.tokenizer.detokenize import Detokenizer

# Every byte, some longer pieces that cut characters anywhere, an empty one and two special tokens.
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [b" the", "é".encode(), "😀".encode()[:3], "日本".encode()[:4], b"", b"<s>", b"</s>"]
WORDS = Vocabulary(PIECES, special=[len(PIECES) - 2, len(PIECES) - 1], lead_spaces=1)
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)


def run(detokenizer: Detokenizer, tokens: list[int]) -> str:
    """All texts, each taken from the table where the table knows it, as the streams do."""
    shown = []
    for token in tokens:
        text = detokenizer.table()[token]
        shown.append(detokenizer.feed(token) if text is None else text)
    return "".join(shown) + detokenizer.flush()


@given(TOKENS, st.booleans(), st.booleans())
def test_token_by_token_equals_all_at_once(tokens: list[int], skip_special: bool, at_start: bool) -> None:
    kept = [token for token in tokens if not (skip_special and token in WORDS.special)]
    whole = b"".join(PIECES[token] for token in kept).decode("utf-8", "replace")
    if at_start and whole.startswith(" "):
        whole = whole[1:]
    assert run(Detokenizer(WORDS, skip_special, at_start), tokens) == whole
    fed = Detokenizer(WORDS, skip_special, at_start)
    assert "".join([fed.feed(token) for token in tokens]) + fed.flush() == whole


@given(st.text(max_size=20))
def test_a_valid_text_is_never_cut_or_replaced(text: str) -> None:
    detokenizer, shown = Detokenizer(WORDS, True), ""
    for token in text.encode():
        shown += detokenizer.feed(token)
        assert text.startswith(shown)
    assert shown == text and detokenizer.flush() == ""


def test_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(WORDS, True)
    assert [detokenizer.feed(token) for token in "é😀".encode()[:5]] == ["", "é", "", "", ""]
    assert detokenizer.table() is WORDS.no_texts
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.table() is WORDS.texts_without_special


def test_special_token_inside_a_character_is_skipped() -> None:
    detokenizer = Detokenizer(WORDS, True)
    first, second = "é".encode()
    assert [detokenizer.feed(token) for token in (first, len(PIECES) - 1, second)] == ["", "", "é"]


def test_invalid_byte_is_replaced_as_soon_as_it_is_known() -> None:
    detokenizer = Detokenizer(WORDS, True)
    assert detokenizer.feed(0xE2) == ""
    assert detokenizer.feed(ord("a")) == "\ufffda"


def test_metaspace_text_loses_all_leading_spaces_of_its_first_word() -> None:
    words = Vocabulary([b"  ", b" a"], lead_spaces=ALL_SPACES)
    detokenizer = Detokenizer(words, True, at_start=True)
    assert [detokenizer.feed(token) for token in (0, 1, 1)] == ["", " a", " a"]


def test_token_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(WORDS, True).feed(len(PIECES))


@given(st.data())
def test_bundled_tokenizer_streams_what_the_library_decodes(
    smollm: Tokenizer, smollm_words: Vocabulary, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, smollm_words.size - 1), max_size=30))
    for skip_special in (True, False):
        whole = smollm.decode(tokens, skip_special_tokens=skip_special)
        assert run(Detokenizer(smollm_words, skip_special), tokens) == whole


@given(st.text("abc de\n😀é日", max_size=30))
def test_sentencepiece_streams_the_text_with_its_spaces(
    sentencepiece_model: bytes, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    words = vocabulary.build(gguf_tokenizer.build(sentencepiece_metadata))
    tokens = processor.encode(text)
    assert run(Detokenizer(words, True, at_start=True), tokens) == processor.decode(tokens) == text
    # After a prompt the space belongs to the text.
    assert run(Detokenizer(words, True, at_start=False), tokens) == " " * bool(text) + text

from itertools import pairwise
from typing import Any

import pytest
import regex
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common import gguf_tokenizer
from common.errors import ConfigError
from common.gguf_tokenizer import SPLITS, merges_by_score
from common.vocabulary import byte_alphabet

TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return x**2  # squares\n\n\tif x >= 10_000: print(f'{x:.3f}')\r\n",
    "Größe naïve — “quotes” … Ελληνικά кириллица עברית العربية हिन्दी ไทย",
    "日本語のテキスト 中文字符 한국어",
    "😀👩‍👩‍👧‍👦🇫🇷 emoji\u200d and\u00a0odd\u2003spaces\u3000",
    "1234567890 3.14159 12½ ²³ ٣٤٥ Ⅷ 0x1F",
    "   leading,  double   and trailing   ",
    "\n\n\n\t\t  \n x",
    "don't DON'T we'll they've I'm it's 'tis",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|> <|endoftext|>text<file_sep>",
    "a" * 300,
    "\x00\x01\x7f control \ufeff bom \ufffd",
    "e\u0301 combining",
    "",
    " ",
]
ANY_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t'019aeéß日😀")), max_size=40
)


class Reference:
    """Byte-level BPE with single digits, written from its definition: slow, and sharing nothing with the library."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: place for place, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        kinds = metadata["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, sorted(special, key=len, reverse=True))) + ")")
        self.words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        self.alphabet = {byte: chr(code) for code, byte in byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for part in self.special.split(text):
            if part in self.ids and self.special.fullmatch(part):
                found.append(self.ids[part])
                continue
            for stretch in regex.split(r"(\p{N})", part):
                words = [stretch] if regex.fullmatch(r"\p{N}", stretch) else self.words.findall(stretch)
                for word in words:
                    found += self.word(word)
        return found

    def word(self, word: str) -> list[int]:
        # The vocabulary lacks 21 bytes; without an unknown token they are dropped first.
        symbols = [symbol for byte in word.encode() if (symbol := self.alphabet[chr(byte)]) in self.ids]
        while True:
            pairs = [(self.ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in self.ranks]
            if not pairs:
                return [self.ids[symbol] for symbol in symbols]
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.fixture(scope="module")
def reference(smollm_metadata: dict[str, Any]) -> Reference:
    return Reference(smollm_metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_bundled_tokenizer_gives_the_ids_of_the_definition(smollm: Tokenizer, reference: Reference, text: str) -> None:
    assert smollm.encode(text).ids == reference.encode(text)


@given(text=ANY_TEXT)
@settings(max_examples=500)
def test_bundled_tokenizer_on_any_text(smollm: Tokenizer, reference: Reference, text: str) -> None:
    assert smollm.encode(text).ids == reference.encode(text)


def test_known_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("<|im_start|>user\n").ids == [1, 4093, 198]
    assert [smollm.id_to_token(i) for i in smollm.encode(" 42").ids] == ["Ġ", "4", "2"]


def test_special_tokens_have_names(smollm_metadata: dict[str, Any]) -> None:
    named = gguf_tokenizer.special_tokens(smollm_metadata)
    assert named["bos_token"] == "<|im_start|>" and named["eos_token"] == "<|im_end|>"


def tiny(**changes: Any) -> dict[str, Any]:
    tokens = [chr(code) for code in byte_alphabet()] + ["<s>", "<think>", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_bos_is_added_when_the_file_asks() -> None:
    assert 256 not in gguf_tokenizer.build(tiny()).encode("ab").ids
    assert gguf_tokenizer.build(tiny(add_bos_token=True)).encode("ab").ids == [256, 258]
    framed = gguf_tokenizer.build(tiny(add_bos_token=True, add_eos_token=True, eos_token_id=256))
    assert framed.encode("ab").ids == [256, 258, 256]
    assert framed.encode("ab", add_special_tokens=False).ids == [258]


def test_llama3_files_have_bos_by_default_and_keep_whole_words() -> None:
    metadata = tiny(pre="llama-bpe", merges=[])
    assert gguf_tokenizer.build(metadata).encode("ab").ids == [256, 258]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokenizer = gguf_tokenizer.build(tiny())
    assert tokenizer.encode("<think>ab").ids == [257, 258]
    assert tokenizer.decode([257, 256], skip_special_tokens=True) == "<think>"


def test_qwen2_text_is_composed_first() -> None:
    tokenizer = gguf_tokenizer.build(tiny(pre="qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids
    plain = gguf_tokenizer.build(tiny())
    assert plain.encode("e\u0301").ids != plain.encode("é").ids


SPLIT_CASES = {
    "default": ("ab 12345 x", ["ab", " ", "123", "45", " x"]),
    "gpt-2": ("ab 12345's", ["ab", " 12345", "'s"]),
    "smollm": ("ab 123", ["ab", " ", "1", "2", "3"]),
    "llama-bpe": ("I'LL 12345\n\n  x", ["I", "'LL", " ", "123", "45", "\n\n", " ", " x"]),
    "qwen2": ("I'LL 123", ["I", "'LL", " ", "1", "2", "3"]),
    "qwen35": ("e\u0301a 12", ["éa", " ", "1", "2"]),
    "tekken": ("FooBar 12", ["Foo", "Bar", " ", "1", "2"]),
    "gpt-4o": ("FooBar's 1234", ["Foo", "Bar's", " ", "123", "4"]),
    "deepseek-v3": ("ab漢字 1234.x", ["ab", "漢字", " ", "123", "4", ".x"]),
}


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_pieces(name: str) -> None:
    text, expected = SPLIT_CASES[name]
    tokenizer = gguf_tokenizer.build(tiny(pre=name))
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    alphabet = byte_alphabet()
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
    assert [piece.translate(alphabet).encode("latin-1").decode() for piece in pieces] == expected


@given(text=ANY_TEXT, name=st.sampled_from(sorted(SPLITS)))
def test_every_split_loses_nothing(text: str, name: str) -> None:
    tokenizer = gguf_tokenizer.build(tiny(pre=name))
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == normal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, '"bert"'),
        ({"pre": "nobody"}, '"nobody"'),
        ({"tokens": []}, "no tokenizer"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["a z z"]}, "merge"),
        ({"merges": ["a"]}, "merge"),
        ({"add_bos_token": True, "bos_token_id": 999}, "999"),
        ({"tokens": ["a"] * 259}, "twice"),
        ({"token_type": 7}, "token_type is 7"),
        ({"merges": [1]}, "merges is"),
        ({"merges": 5}, "merges is 5"),
        ({"pre": ["gpt-2"]}, "pre-tokenizer"),
    ],
)
def test_damaged_files_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gguf_tokenizer.build(tiny(**changes))


@given(text=st.text("abcde qwrtyp.,\n\t12é😀ß日 ", max_size=40))
def test_sentencepiece_gives_the_ids_of_its_library(
    sentencepiece_model: bytes, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    tokenizer = gguf_tokenizer.build(sentencepiece_metadata)
    expected = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.encode(text).ids == [processor.bos_id(), *expected]


def test_merges_follow_the_scores() -> None:
    vocab = {token: place for place, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_by_score(vocab, scores, [1] * 6) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
    with pytest.raises(ConfigError, match="scores"):
        merges_by_score(vocab, [], [1] * 6)

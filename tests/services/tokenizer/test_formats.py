from array import array

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from common import vocabulary
from common.dialects.registry import REASONING, TOOLS, Dialects
from common.errors import Reject
from common.protocol import Options, PromptKind, Sampling, Submit, TextFormat
from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.formats import Formats

MARKERS = ["<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]


@pytest.fixture(scope="module")
def words(smollm: Tokenizer) -> tuple[Tokenizer, vocabulary.Vocabulary]:
    tokenizer = Tokenizer.from_str(smollm.to_str())
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return tokenizer, vocabulary.build(tokenizer)


def submit(parts: int) -> Submit:
    return Submit(7, PromptKind.CHAT, Sampling(16), parts=parts)


def ids(tokenizer: Tokenizer, text: str) -> "array[int]":
    return array("i", tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(words: vocabulary.Vocabulary, tokens: "array[int]") -> str:
    shown = Detokenizer(words, True)
    return "".join(shown.feed(token) for token in tokens) + shown.flush()


def test_only_the_markers_that_are_needed_are_shown(words: tuple[Tokenizer, vocabulary.Vocabulary]) -> None:
    tokenizer, table = words
    formats = Formats(Dialects(TOOLS["mistral"], REASONING["think"]), table)
    tokens = ids(tokenizer, "<think>a</think>[TOOL_CALLS]f[ARGS]{}<|im_end|>")
    assert text_of(formats.words(submit(3)), tokens) == "<think>a</think>[TOOL_CALLS]f[ARGS]{}"
    assert text_of(formats.words(submit(1)), tokens) == "<think>a</think>f{}"
    assert text_of(formats.words(submit(0)), tokens) == text_of(table, tokens) == "af{}"
    assert formats.words(submit(0)) is table
    table.widen(table.size + 5)
    assert len(formats.words(submit(3)).texts_without_special) == table.size


def test_what_the_api_is_told(words: tuple[Tokenizer, vocabulary.Vocabulary]) -> None:
    tokenizer, table = words
    formats = Formats(Dialects(TOOLS["mistral"], REASONING["think"]), table)
    asked, thinking = ids(tokenizer, "<think>x</think>hi"), ids(tokenizer, "hi<think>\n")
    assert formats.told(submit(3), asked) == TextFormat(7, "mistral", "think", False, len(asked))
    assert formats.told(submit(1), thinking) == TextFormat(7, "", "think", True, len(thinking))
    with_ids = msgspec.structs.replace(submit(0), options=Options(token_ids=True))
    assert formats.told(with_ids, asked) == TextFormat(7, prompt_tokens=len(asked), prompt=asked.tobytes())
    plain = Formats(Dialects(None, None), table)
    assert plain.told(submit(1), asked) is None
    with pytest.raises(Reject, match=r"model\.tool_parser") as refused:
        plain.told(submit(3), asked)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"),
    [
        ("<think>a b</think>c d", False, "<think>a b</think>"),
        ("a b</think>c d", True, "a b</think>"),
        ("a b", True, "a b"),
        ("a <think>b</think>", False, ""),
        ("<think>né\U0001f600 b</think>c", False, "<think>né\U0001f600 b</think>"),
        ("", True, ""),
    ],
)
def test_tokens_of_reasoning(
    words: tuple[Tokenizer, vocabulary.Vocabulary], text: str, opened: bool, reasoning: str
) -> None:
    tokenizer, table = words
    formats = Formats(Dialects(None, REASONING["think"]), table)
    told = TextFormat(7, "", "think", opened)
    assert formats.reasoning_tokens(submit(1), told, ids(tokenizer, text)) == len(ids(tokenizer, reasoning))
    assert formats.reasoning_tokens(submit(1), None, ids(tokenizer, text)) == 0

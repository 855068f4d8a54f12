import json
from array import array
from base64 import b64decode
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32
from common.errors import Reject, RejectReason
from common.pooling import Embedding, Pooling
from common.protocol import FinishReason, PromptKind, Submit, TextFinished
from services.api.hub import Choice, Request
from services.api.schema.embedding import BODY, EmbeddingRequest, reply_of, submits_of
from tests.services.api.system import FACTS

MODEL = Embedding(8, "mean", normalize=False)
KNOWING = msgspec.structs.replace(FACTS, embedding=MODEL)


def parsed(**fields: Any) -> EmbeddingRequest:
    return BODY.parse(json.dumps({"input": "x", **fields}).encode())


def submits(gives: Embedding = MODEL, **fields: Any) -> list[Submit]:
    return submits_of(parsed(**fields), msgspec.structs.replace(FACTS, embedding=gives))


def refused(gives: Embedding = MODEL, **fields: Any) -> Reject:
    with pytest.raises(Reject) as caught:
        submits(gives, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("given", "texts", "tokens"),
    [
        ("ab", ["ab"], []),
        (["a", "", "c"], ["a", "", "c"], []),
        ([5, 6], [], [[5, 6]]),
        ([[5], [6, 7]], [], [[5], [6, 7]]),
    ],
)
def test_the_four_forms_of_input(given: Any, texts: list[str], tokens: list[list[int]]) -> None:
    made = submits(input=given)
    assert [each.text for each in made if each.kind is PromptKind.TEXT] == texts
    assert [each.tokens for each in made if each.kind is PromptKind.TOKENS] == [pack_i32(each) for each in tokens]
    assert all((each.n, each.sampling.max_tokens, each.sampling.report.asks) == (1, 0, False) for each in made)


def test_what_is_asked_for_comes_before_what_the_model_was_made_for() -> None:
    def pooling(model: Embedding = MODEL, **fields: Any) -> Pooling | None:
        return submits(model, **fields)[0].sampling.report.pooling

    assert pooling() == Pooling("mean", False)
    assert pooling(pooling="last", normalize=True) == Pooling("last", True)
    assert pooling(use_activation=True) == Pooling("mean", True)
    assert pooling(dimensions=8) == Pooling("mean", False)
    assert pooling(Embedding(8, lengths=()), dimensions=3) == Pooling("last", True, 3)
    assert pooling(Embedding(8, lengths=(2, 4)), dimensions=4) == Pooling("last", True, 4)


def test_options_go_with_each_input() -> None:
    (made,) = submits(truncate_prompt_tokens=3, add_special_tokens=False, priority=-2, cache_salt="s")
    assert (made.options.keep_tokens, made.options.plain, made.priority, made.cache_salt) == (3, True, -2, "s")
    (plain,) = submits()
    assert (plain.options.keep_tokens, plain.options.plain) == (0, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], 1]}, "input"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"input": 5}, "input"),
        ({"input": [1000]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 4}, "dimensions"),
        ({"dimensions": 9}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": True, "use_activation": False}, "use_activation"),
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_dimensions_of_models_that_may_be_cut() -> None:
    assert "2, 4" in refused(Embedding(8, lengths=(2, 4)), dimensions=3).message
    assert refused(Embedding(8, lengths=()), dimensions=9).param == "dimensions"
    fault = refused(Embedding(lacks="it pools by cls"))
    assert fault.param == "model" and "cls" in fault.message


def test_ids_beyond_the_context_are_cut_only_if_asked() -> None:
    ids = [1] * (FACTS.max_model_len + 1)
    assert refused(input=ids).reason is RejectReason.TOO_LONG
    assert len(submits(input=ids, truncate_prompt_tokens=-1)) == 1
    assert len(submits(input=ids[1:])) == 1, "no room is needed for an output"


def done(*vectors: bytes) -> Request:
    request = Request(0.0, 0)
    for index, vector in enumerate(vectors):
        choice = Choice(request, index, index, 1, submits()[0])
        choice.finished = TextFinished(index, FinishReason.EOS, 3, 0, vector=vector)
        request.choices.append(choice)
    return request


def test_both_forms_of_a_vector() -> None:
    values = array("f", [0.5, -1.25]).tobytes()
    made = reply_of(parsed(), "tiny", done(values, values))
    assert [(each.index, each.embedding) for each in made.data] == [(0, [0.5, -1.25]), (1, [0.5, -1.25])]
    assert (made.usage.prompt_tokens, made.usage.total_tokens, made.model) == (6, 6, "tiny")
    (only,) = reply_of(parsed(encoding_format="base64"), "tiny", done(values)).data
    assert isinstance(only.embedding, str) and b64decode(only.embedding) == values


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf"), 0.0]])
def test_what_is_no_vector_is_not_told(values: list[float]) -> None:
    with pytest.raises(Reject) as caught:
        reply_of(parsed(), "tiny", done(array("f", [1.0]).tobytes(), array("f", values).tobytes()))
    assert caught.value.reason is RejectReason.INTERNAL and "input 1" in caught.value.message

import json
from typing import Any

import pytest

from common.columns import unpack_i32
from common.errors import Reject
from common.logprobs import Report
from common.protocol import ModelFacts, PromptKind, Submit
from services.api.schema.completion import BODY, submits_of

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64)


def submits(prompt: Any, **more: Any) -> list[Submit]:
    return submits_of(BODY.parse(json.dumps({"prompt": prompt, **more}).encode()), FACTS, 8)


def test_a_string() -> None:
    (submit,) = submits("hello")
    assert (submit.kind, submit.text, submit.n, submit.sampling.max_tokens) == (PromptKind.TEXT, "hello", 1, 16)


def test_a_list_of_strings_is_a_prompt_each() -> None:
    first, second = submits(["a", ""], n=2, seed=5)
    assert (first.text, second.text, first.n, second.n) == ("a", "", 2, 2)
    assert first.sampling == second.sampling


def test_token_ids_are_one_prompt() -> None:
    (submit,) = submits([1, 2, 999])
    assert submit.kind is PromptKind.TOKENS and list(unpack_i32(submit.tokens)) == [1, 2, 999]


def test_lists_of_token_ids() -> None:
    assert [list(unpack_i32(submit.tokens)) for submit in submits([[1], [2, 3]])] == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {},
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [[1], 2],
        [1000],
        [[0], [1000]],
        [-1],
        [1.5],
        [[["a"]]],
        [None],
        [True],
    ],
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    with pytest.raises(Reject) as caught:
        submits(prompt)
    assert caught.value.param is not None and caught.value.param.startswith("prompt")


def test_a_prompt_is_required() -> None:
    with pytest.raises(Reject) as caught:
        BODY.parse(b'{"model": "tiny"}')
    assert caught.value.param == "prompt"


def test_seeds_that_are_not_given_differ_by_prompt() -> None:
    first, second = submits(["a", "a"])
    assert first.sampling.seed != second.sampling.seed


def test_log_probabilities_of_output_and_of_what_is_echoed() -> None:
    def report(**fields: Any) -> Report:
        (made,) = submits("x", **fields)
        return made.sampling.report

    assert report() == report(echo=True) == Report()
    assert report(logprobs=0) == Report(0) and report(logprobs=5, echo=True) == Report(5, 5)
    assert report(logprobs=1, echo=True, prompt_logprobs=3) == Report(1, 3)
    assert report(prompt_logprobs=0) == Report(-1, 0)
    assert report(logprobs=1, echo=True, logprob_token_ids=[7, 5, 9]) == Report(3, 1, named=(7, 5, 9))
    assert report(logprobs=1, best_of=2, logprob_token_ids=[7]) == Report(1, named=(7,))
    for most, fields in ((20, {"logprobs": 21}), (20, {"logprobs": -1}), (2, {"prompt_logprobs": 3})):
        with pytest.raises(Reject) as caught:
            submits_of(BODY.parse(json.dumps({"prompt": "x", **fields}).encode()), FACTS, 8, most)
        assert caught.value.param == next(iter(fields))


def test_without_any_output_one_token_is_drawn_for_nobody() -> None:
    (made,) = submits("x", max_tokens=0, echo=True, logprobs=1, min_tokens=0, stop=["a"], stop_token_ids=[5])
    assert made.options.silent and made.stop == () and made.sampling.stop_token_ids == ()
    assert (made.sampling.max_tokens, made.sampling.ignore_eos) == (1, True)
    (made,) = submits("x", max_tokens=0, max_completion_tokens=3)
    assert not made.options.silent and made.sampling.max_tokens == 3


def test_the_best_of_more_choices_need_log_probabilities() -> None:
    (made,) = submits("x", n=2, best_of=5)
    assert made.n == 5 and made.sampling.report == Report(0)
    asked = BODY.parse(b'{"prompt": "x", "n": 2, "best_of": 5}')
    assert (asked.form().best, asked.form().shown) == (2, False)
    (made,) = submits("x", n=2, best_of=2, stream=True)
    assert made.n == 2 and made.sampling.report == Report()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 9}, "n"),
        ({"suffix": "y", "echo": True}, "suffix"),
        ({"suffix": "y", "prompt": [1, 2]}, "suffix"),
        ({"logprobs": 1, "max_tokens": 0, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Reject) as caught:
        submits(**{"prompt": "x"} | fields)
    assert caught.value.param == param


def test_a_suffix_and_bad_words_go_to_the_tokenizer() -> None:
    (made,) = submits("x", suffix="y", bad_words=["a"])
    assert (made.options.suffix, made.options.bad_words) == ("y", ("a",))

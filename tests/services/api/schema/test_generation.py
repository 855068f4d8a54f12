import json
import re
from typing import Any

import pytest

from common.errors import Reject, RejectReason
from common.protocol import ModelFacts, Options
from services.api.schema import generation
from services.api.schema.completion import BODY, CompletionRequest, submits_of
from services.api.schema.structured import StructuredFields

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64)


def parse(**fields: Any) -> CompletionRequest:
    return BODY.parse(json.dumps({"prompt": "x", "logprobs": 0, **fields}).encode())


def refused(**fields: Any) -> Reject:
    with pytest.raises(Reject) as caught:
        submits_of(parse(**fields), FACTS, 8)
    return caught.value


# field: (accepted, refused)
TABLE: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["tiny", None], [5, []]),
    "stream": ([True, False, None], ["true", 1]),
    "n": ([1, 8, None], [0, -1, 1.5, "2", 2**40, True]),
    "max_tokens": ([0, 1, 2**31 - 1, None], [-1, "5", 1.5, 2**31, 10**40]),
    "max_completion_tokens": ([1, 2**31 - 1, None], [0, -1, "5", 1.5, 2**31, 10**40]),
    "temperature": ([0, 2, 0.7, None, 1e-300], [-0.1, 2.01, "1", True, 10**400]),
    "top_p": ([1, 0.001, None], [0, 1.1, -1, "1"]),
    "top_k": ([-1, 0, 1, 2**31 - 1, None], [-2, 1.5, "1", 2**31]),
    "min_p": ([0, 1, None], [-0.1, 1.1, "0"]),
    "seed": ([0, -1, 2**63 - 1, -(2**63), None], [2**63, -(2**63) - 1, 1.5, "1"]),
    "stop": (["a", ["a", "b"], [], None], ["", [""], [1], 5, ["x"] * 65, "x" * 1025]),
    "stop_token_ids": ([[0, 999], [], None], [[1000], [-1], ["1"], 5, [2**31], [1] * 1025]),
    "ignore_eos": ([True, None], [1, "true"]),
    "min_tokens": ([0, 5, None], [-1, "1", 2**31]),
    "presence_penalty": ([-2, 2, None], [-2.1, 2.1, "0"]),
    "frequency_penalty": ([-2, 2, None], [-2.1, 2.1, "0"]),
    "repetition_penalty": ([1e-9, 1000, None], [0, 1e-10, -1, 1001, "1"]),
    "logit_bias": (
        [{"0": -100, "999": 100.0}, {}, None],
        [{"1000": 1}, {"-1": 1}, {"a": 1}, {"1.5": 1}, {"1": 101}, {"1": -101}, {"1": "1"}, [], {str(10**30): 1}],
    ),
    "skip_special_tokens": ([True, False, None], [0]),
    "include_stop_str_in_output": ([True, None], ["yes"]),
    "priority": ([-5, 0, 2**31 - 1, None], [2**31, 1.5, "high"]),
    "cache_salt": (["tenant", None], ["", 5, "x" * 1025]),
    "deadline_ms": ([1, 2**31 - 1, None], [0, -1, 1.5, "9", 2**31]),
    "user": (["me", None], [5]),
    "request_id": (["a-b.c:1_", None], ["", "a b", "x" * 129, "a\n", 5]),
    "truncate_prompt_tokens": ([1, -1, None], [-2, 1.5, "1"]),
    "return_token_ids": ([True, False, None], [1]),
    "return_tokens_as_token_ids": ([True, False, None], [1]),
    "allowed_token_ids": ([[0, 999], None], [[], [1000], [-1], 5, [1] * 4097]),
    "bad_words": ([["a", "b c"], [], None], [[""], "a", [5], ["x"] * 257, ["x" * 257]]),
    "repetition_detection": (
        [{"max_pattern_size": 4, "min_count": 2}, {}, {"min_count": 1}, None],
        [
            {"max_pattern_size": 4},
            {"min_pattern_size": 2, "max_pattern_size": 1, "min_count": 2},
            3,
            {"max_pattern_size": 1025, "min_count": 2},
            {"max_pattern_size": -1},
        ],
    ),
    "use_beam_search": ([True, False, None], [1, "yes"]),
    "length_penalty": ([1, 1.0, None], [0.5, 11, "1"]),
    "early_stopping": ([False, None], [True, "never", "always", 1]),
    "prompt_logprobs": ([0, 20, None], [-1, 21, True, 2**31]),
    "logprob_token_ids": ([[0, 999, 0], [], None], [[1000], [-1], ["1"], 5, [1] * 129]),
}


def cases(which: int) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, both in TABLE.items()
        for i, value in enumerate(both[which])
    ]


@pytest.mark.parametrize(("name", "value"), cases(0))
def test_values_that_are_accepted(name: str, value: Any) -> None:
    assert len(submits_of(parse(**{name: value}), FACTS, 8)) == 1


@pytest.mark.parametrize(("name", "value"), cases(1))
def test_values_that_are_refused_by_name(name: str, value: Any) -> None:
    reject = refused(**{name: value})
    assert reject.reason is RejectReason.INVALID
    assert reject.param is not None and re.split(r"[\[.]", reject.param)[0] == name and name in reject.message


def test_the_table_has_every_field() -> None:
    fields = set(generation.GenerationRequest.__struct_fields__)
    assert fields - set(TABLE) == {"stream_options", *StructuredFields.__struct_fields__}  # test_structured.py


def test_everything_arrives_in_sampling() -> None:
    values = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": -1.5},
    }
    sampling = generation.sampling_of(parse(**values), FACTS, 16)
    for name, value in values.items():
        if name not in ("stop_token_ids", "logit_bias"):
            assert getattr(sampling, name) == value
    assert sampling.stop_token_ids == (5, 6) and sampling.logit_bias == ((3, -1.5),)


def test_defaults() -> None:
    sampling = generation.sampling_of(parse(), FACTS, 16)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert generation.sampling_of(parse(temperature=0), FACTS, 0).temperature == 0
    assert generation.sampling_of(parse(top_k=-1), FACTS, 0).top_k == 0


def test_the_newer_limit_wins() -> None:
    sampling = generation.sampling_of(parse(max_tokens=5, max_completion_tokens=9), FACTS, 16)
    assert sampling.max_tokens == 9


def test_a_seed_is_kept_or_drawn() -> None:
    assert generation.sampling_of(parse(seed=-1), FACTS, 1).seed == 2**64 - 1
    drawn = {generation.sampling_of(parse(), FACTS, 1).seed for _ in range(8)}
    assert len(drawn) == 8 and all(0 <= seed < 2**64 for seed in drawn)


def test_min_tokens_above_max_tokens() -> None:
    assert refused(min_tokens=17).param == "min_tokens"
    assert generation.sampling_of(parse(min_tokens=17), FACTS, 0).min_tokens == 17


@pytest.mark.parametrize("model", ["gpt-4", ""])
def test_another_model_is_not_found(model: str) -> None:
    reject = refused(model=model)
    assert (reject.reason, reject.param) == (RejectReason.NOT_FOUND, "model")


def test_stream_options_belong_to_streams() -> None:
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    asked = parse(stream=True, stream_options={"include_usage": True})
    generation.check_common(asked, FACTS, 1, 8)
    assert generation.wants_usage(asked)
    assert not generation.wants_usage(parse(stream=True, stream_options={}))
    assert generation.wants_usage(parse(stream=True, stream_options={"continuous_usage_stats": True}))


def test_too_many_choices() -> None:
    assert refused(n=9).param == "n"
    assert refused(n=3, prompt=["a", "b", "c"]).param == "n"


def test_stops_and_fields_of_the_submit() -> None:
    fields = generation.submit_fields(parse(stop="END", n=2, priority=3, cache_salt="t", skip_special_tokens=False))
    assert fields == {
        "n": 2,
        "stop": ("END",),
        "include_stop": False,
        "skip_special_tokens": False,
        "priority": 3,
        "cache_salt": "t",
        "options": Options(),
    }
    asked = generation.submit_fields(parse(return_token_ids=True, truncate_prompt_tokens=-1))
    assert asked["options"] == Options(0, -1, True, True)
    usage = parse(stream=True, stream_options={"continuous_usage_stats": True})
    assert generation.submit_fields(usage)["options"] == Options(tell_prompt=True)
    assert generation.submit_fields(parse())["skip_special_tokens"] is True


@pytest.mark.parametrize(
    ("name", "harmless", "asking"),
    [
        ("store", False, True),
        ("prompt_embeds", None, "AAAA"),
        ("truncation_side", "left", "right"),
    ],
)
def test_unsupported_fields_are_refused_only_when_they_ask_for_something(name: str, harmless: Any, asking: Any) -> None:
    assert parse(**{name: harmless}).prompt == "x"
    assert parse(**{name: None}).prompt == "x"
    assert refused(**{name: asking}).param == name


@pytest.mark.parametrize(
    ("include", "continuous", "at_the_end", "everywhere"),
    [
        (True, None, True, False),
        (True, True, True, True),
        (None, True, True, True),
        (False, True, False, False),
        (False, None, False, False),
    ],
)
def test_no_usage_for_who_wants_none(include: Any, continuous: Any, at_the_end: bool, everywhere: bool) -> None:
    asked = parse(stream=True, stream_options={"include_usage": include, "continuous_usage_stats": continuous})
    assert (generation.wants_usage(asked), generation.continuous_usage(asked)) == (at_the_end, everywhere)


def test_some_token_may_come() -> None:
    assert parse(allowed_token_ids=[2]).allowed_token_ids == [2]
    assert refused(allowed_token_ids=[2, 5], min_tokens=1, stop_token_ids=[5]).param == "allowed_token_ids"
    assert refused(allowed_token_ids=[5], structured_outputs={"regex": "a"}).param == "allowed_token_ids"
    made = generation.sampling_of(parse(allowed_token_ids=[2, 5], min_tokens=1), FACTS, 16)
    assert made.words.allowed == (2, 5)

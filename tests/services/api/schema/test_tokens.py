import json
from typing import Any

import pytest

from common.errors import Reject
from services.api.schema import chat, completion, tokens
from services.api.schema.conversion import renamed


def given(**fields: Any) -> tokens.GenerateRequest:
    return tokens.BODY.parse(json.dumps({"token_ids": [1, 2]} | fields).encode())


def test_ids_to_ids_is_a_completion() -> None:
    made = tokens.completion_of(
        given(sampling_params={"max_tokens": 3, "n": 2, "detokenize": False}, priority=4, request_id="r"), 128
    )
    assert (made.prompt, made.max_tokens, made.n, made.priority, made.request_id) == ([1, 2], 3, 2, 4, "r")
    assert made.return_token_ids
    assert tokens.completion_of(given(), 128).max_tokens == 126, "what the context leaves, not the 16 of completions"
    assert tokens.completion_of(given(sampling_params={"max_completion_tokens": 5}), 128).max_tokens is None


def generate(**fields: Any) -> None:
    asked = given(**fields)
    with renamed(tokens.names(asked)):
        tokens.completion_of(asked, 128)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"sampling_params": {"model": "x"}}, "sampling_params.model"),
        ({"sampling_params": {"logprobs": "1"}}, "sampling_params.logprobs"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, "sampling_params.prompt_logprob_token_ids"),
        ({"features": {}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Reject) as caught:
        generate(**fields)
    assert caught.value.param == param


def test_what_is_rendered_can_be_generated() -> None:
    asked = chat.BODY.parse(b'{"messages": [], "temperature": 0.5, "stop": ["x"], "stream": true, "cache_salt": "s"}')
    made = tokens.rendered(asked, [1, 2, 3], "r", room=97)
    assert made.sampling_params == {"temperature": 0.5, "stop": ["x"], "max_tokens": 97} and made.cache_salt == "s"
    again = tokens.completion_of(tokens.BODY.parse(json.dumps({"token_ids": made.token_ids}).encode()), 128)
    assert again.prompt == [1, 2, 3]
    text = completion.BODY.parse(b'{"prompt": "x"}')
    assert tokens.rendered(text, [1], "r", 0).sampling_params == {"max_tokens": 16}, "a completion has its default"

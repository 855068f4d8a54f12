"""Fields of requests beyond OpenAI's, through the OpenAI SDK: a stream says what a whole reply says, field by field."""

from typing import Any

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}


def both(client: openai.OpenAI, prompt: Any, **more: Any) -> tuple[Any, Any]:
    """Text and token ids of the reply as a whole, after checking that a stream has the same; and the reply."""
    asked = GREEDY | more
    whole = client.completions.create(prompt=prompt, **asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(prompt=prompt, **asked, stream=True, stream_options=options))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    (first,) = whole.choices
    assert "".join(choice.text for choice in choices) == first.text
    streamed = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert streamed == (getattr(first, "token_ids", None) or [])
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}
    return first, whole


def test_echo_and_token_ids(client: openai.OpenAI) -> None:
    plain, _ = both(client, "The capital of France is")
    more = {"extra_body": {"return_token_ids": True}}
    echoed, whole = both(client, "The capital of France is", echo=True, **more)
    assert echoed.text == "The capital of France is" + plain.text
    assert len(echoed.prompt_token_ids) == whole.usage.prompt_tokens
    assert len(echoed.token_ids) == whole.usage.completion_tokens
    again, _ = both(client, echoed.prompt_token_ids, echo=True, **more)
    assert again.text == echoed.text and again.token_ids == echoed.token_ids


def test_a_prompt_is_truncated_from_the_left(client: openai.OpenAI) -> None:
    ids = list(range(300, 340))
    kept, whole = both(client, ids, extra_body={"truncate_prompt_tokens": 7, "return_token_ids": True})
    assert kept.prompt_token_ids == ids[-7:] and whole.usage.prompt_tokens == 7
    assert kept.text == both(client, ids[-7:])[0].text
    with pytest.raises(openai.BadRequestError, match="truncated"):
        both(client, ids, echo=True, extra_body={"truncate_prompt_tokens": 7})


def test_a_message_goes_on(client: openai.OpenAI) -> None:
    talk = [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "The capital of France"},
    ]
    asked: dict[str, Any] = GREEDY | {"messages": talk}
    more = {"continue_final_message": True, "request_id": "mine-1", "return_token_ids": True}
    reply = client.chat.completions.create(**asked, extra_body=more)
    assert reply.choices[0].message.content.startswith(" is Paris") and reply.id == "chatcmpl-mine-1"
    assert len(reply.choices[0].token_ids) == 6 and len(reply.prompt_token_ids) == reply.usage.prompt_tokens
    events = client.chat.completions.create(**asked, extra_body=more, stream=True)
    found = list(events)
    ids = [token for event in found for token in getattr(event.choices[0], "token_ids", None) or []]
    assert ids == reply.choices[0].token_ids and found[0].prompt_token_ids == reply.prompt_token_ids
    echoed = client.chat.completions.create(**asked, extra_body=more | {"echo": True})
    assert echoed.choices[0].message.content == talk[1]["content"] + reply.choices[0].message.content


def test_an_output_that_goes_round_in_circles(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 40, "prompt": "la la la"}
    more = {"allowed_token_ids": [300], "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    asked["extra_body"] = more | {"return_token_ids": True}
    (whole,) = client.completions.create(**asked).choices
    assert (whole.finish_reason, whole.stop_reason) == ("repetition", "repetition_detected")
    assert whole.token_ids == [300] * 4
    events = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
    assert "".join(event.text for event in events) == whole.text and events[-1].finish_reason == "repetition"
    with pytest.raises(openai.BadRequestError, match="min_count"):
        client.completions.create(**asked | {"extra_body": {"repetition_detection": {"max_pattern_size": 3}}})


def test_a_stop_string_does_not_hide_what_was_cached(client: openai.OpenAI) -> None:
    ids = list(range(700, 740))
    asked: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    reply = client.completions.create(**asked, stop=text[8:10])
    assert reply.choices[0].finish_reason == "stop" and reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None and reply.usage.prompt_tokens_details.cached_tokens == 32


def test_log_probabilities_from_ids_to_ids(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [1, 300, 301, 302], "max_tokens": 3, "temperature": 0}
    (said,) = client.completions.create(**asked, logprobs=2).choices
    params = {"max_tokens": 3, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    body = {"token_ids": asked["prompt"], "sampling_params": params}
    reply = client.post("/inference/v1/generate".replace("/", "/../", 1), cast_to=dict[str, Any], body=body)
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert said.logprobs is not None
    assert [each["logprob"] for each in content] == pytest.approx(said.logprobs.token_logprobs, abs=1e-3)
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert reply["prompt_logprobs"][0] is None and len(reply["prompt_logprobs"]) == 4

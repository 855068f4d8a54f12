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
    ids = [token for event in events for token in getattr(event.choices[0], "token_ids", None) or []]
    assert ids == reply.choices[0].token_ids

"""The OpenAI SDK against the running services."""

import openai
import pytest

from benchmarks.system import System

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_default_mode_answers_paris() -> None:
    """The mode that a newcomer gets; all other tests use the exact one.

    One row decodes by the weights' form for few rows, twelve side by side by the form for many.
    """
    with System() as system, openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=120) as client:
        for count in (1, 12):
            reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, n=count)
            assert [choice.message.content for choice in reply.choices] == ["The capital of France is Paris."] * count


def test_chat_answers_paris(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    choice = reply.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens < 32


def test_streamed_chat_is_the_same_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == plain.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_several_prompts_and_choices(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["The sky is", "Two plus two is"], n=2, max_tokens=4, temperature=0
    )
    texts = [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]
    assert [choice.index for choice in sorted(reply.choices, key=lambda choice: choice.index)] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert reply.usage.completion_tokens == 16


def test_token_ids_and_text_are_the_same_prompt(client: openai.OpenAI) -> None:
    text = "Once upon a time"
    ids = client.post("../tokenize", body={"model": MODEL, "prompt": text}, cast_to=object)["tokens"]
    settings = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    assert (
        client.completions.create(prompt=ids, **settings).choices[0].text
        == client.completions.create(prompt=text, **settings).choices[0].text
    )


def test_stop_strings_end_before_themselves(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**settings).choices[0].message.content
    word = whole.split()[3]
    for stream in (False, True):
        reply = client.chat.completions.create(**settings, stop=[word], stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in reply]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            reason = chunks[-1].finish_reason
        else:
            text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert text == whole[: whole.index(word)]
        assert reason == "stop"


def test_length_ends_are_told(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="One, two, three", max_tokens=5, temperature=0)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 5


def test_min_tokens_and_ignore_eos_go_on(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_tokens": 40}
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, extra_body=extra
    )
    assert reply.usage.completion_tokens == 40


def test_a_prefix_is_found_again(client: openai.OpenAI) -> None:
    prompt = "The following is a long list of animals that live in the forest. " * 8
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 32
    assert second.choices[0].text == first.choices[0].text


def test_a_seeded_request_repeats_itself_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    import concurrent.futures

    def ask(seed: int) -> str:
        reply = client.completions.create(model=MODEL, prompt="A story:", max_tokens=24, seed=seed, temperature=1.0)
        return reply.choices[0].text

    alone = ask(7)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        crowd = list(pool.map(ask, [7, *range(100, 131)]))
    assert crowd[0] == alone
    assert len(set(crowd)) > 16


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert models[0].max_model_len == 8192
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x", max_tokens=1)

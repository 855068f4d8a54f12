"""The OpenAI SDK against running services whose model writes what a request tells it to: calls and reasoning."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from common.dialects.registry import TOOLS
from tests.common.dialects.reading import EXAMPLES, PARIS, TIME, WEATHER
from tests.e2e.scripted import scripted
from tests.e2e.steered import Steered

ASKED: dict[str, Any] = {"model": "m", "tools": [WEATHER, TIME], "max_tokens": 1000}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    path = tmp_path_factory.mktemp("hermes") / "model"
    settings = ("services.tokenizer.replicas=2", "worker.step_us=2000")
    with scripted(path, "<tool_call> <think>", ("<think>", "</think>"), *settings) as system:
        yield system


@pytest.fixture(scope="module")
def hermes(system: Steered) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("harmony") / "model"
    special = tuple(set(TOOLS["harmony"].markers))
    with scripted(path, "<|channel|> <|message|>", special) as system:
        yield openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60)


def both(client: openai.OpenAI, script: str, **more: Any) -> Any:
    """The answer as a whole; that a stream says the same is checked here."""
    asked = ASKED | {"messages": [{"role": "user", "content": script}]} | more
    whole = client.chat.completions.create(**asked)
    events = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    words, usage = [], None
    for chunk in events:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            words += [choice.finish_reason] if choice.finish_reason else []
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append({"name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    (choice,) = whole.choices
    message = choice.message
    assert words == [choice.finish_reason]
    assert content == (message.content or "")
    assert reasoning == (getattr(message, "reasoning_content", None) or "")
    made = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or []]
    assert calls == made
    assert usage == whole.usage
    return whole


def test_calls_of_hermes(hermes: openai.OpenAI) -> None:
    reply = both(hermes, "<think>\nWhere?\n</think>\n\n" + EXAMPLES["hermes"])
    (choice,) = reply.choices
    first, second = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Where?"
    assert first.function.name == "get_weather" and json.loads(first.function.arguments) == PARIS
    assert second.function.name == "time.now" and first.id != second.id
    details = reply.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < reply.usage.completion_tokens


def test_the_prompt_begins_the_reasoning(hermes: openai.OpenAI) -> None:
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    (choice,) = both(hermes, "Hm.\n</think>\n\nYes.", tools=[], **thinks).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Yes.")
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    (hidden,) = both(hermes, "Hm.</think>Yes.", reasoning_effort="low", extra_body={"include_reasoning": False}).choices
    assert hidden.message.content == "Yes." and not hasattr(hidden.message, "reasoning_content")


def test_a_call_that_is_cut_off(hermes: openai.OpenAI) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris'
    (choice,) = both(hermes, text + " and Rome, and all the others" * 9, max_tokens=24).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and call.function.arguments.startswith('{"city": "Paris')
    (plain,) = both(hermes, '<tool_call>\n{"nam').choices
    assert plain.finish_reason == "stop" and plain.message.content == '<tool_call>\n{"nam'


def test_choices_of_tools(hermes: openai.OpenAI) -> None:
    (none,) = both(hermes, EXAMPLES["hermes"], tool_choice="none").choices
    assert none.message.tool_calls is None and none.message.content == EXAMPLES["hermes"]
    (one,) = both(hermes, EXAMPLES["hermes"], parallel_tool_calls=False).choices
    assert [call.function.name for call in one.message.tool_calls] == ["get_weather"]
    with pytest.raises(openai.BadRequestError, match="none of the tools"):
        both(hermes, "x", tool_choice={"type": "function", "function": {"name": "other"}})


def test_the_sdk_puts_a_streamed_call_together(hermes: openai.OpenAI) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": EXAMPLES["hermes"]}]}
    asked["tools"] = [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]
    with hermes.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(deltas) > 5  # piece by piece
    assert final.message.tool_calls[0].function.parsed_arguments == PARIS


def test_history_of_calls(hermes: openai.OpenAI) -> None:
    called = both(hermes, EXAMPLES["hermes"]).choices[0].message
    first, second = called.tool_calls
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in (first, second)]
    asked = ASKED | {"messages": [{"role": "user", "content": "go"}, called, *answers[:1]]}
    assert hermes.chat.completions.create(**asked).choices[0].message.content == "rain"


def lose_services(system: Steered) -> None:
    for service, number in (("tokenizer", 0), ("tokenizer", 1), ("scheduler", 0)):
        system.kill(service, number)


def test_lost_services_in_the_middle_of_a_call_change_nothing(hermes: openai.OpenAI, system: Steered) -> None:
    """Tokenizers and the scheduler are killed while arguments stream; they go on where they stopped."""
    city = 'Paris, \\"the\\" place ' * 30
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    script = "<think>\nHm.\n</think>\n\nSo:\n" + call
    asked = ASKED | {"messages": [{"role": "user", "content": script}]}
    arguments, reasoning, words, before = "", "", [], 0

    def lose() -> None:
        nonlocal before
        lose_services(system)
        before = len(arguments)

    with system.struck([lose], steps=90):
        for chunk in hermes.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for made in choice.delta.tool_calls or []:
                arguments += made.function.arguments or ""
            words += [choice.finish_reason] if choice.finish_reason else []
    assert words == ["tool_calls"] and reasoning == "Hm." and before < len(arguments)
    assert arguments == f'{{"city": "{city}"}}'


def test_reasoning_is_bounded(hermes: openai.OpenAI, system: Steered) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}
    reply = both(hermes, " " + " ".join(words), tools=[], extra_body=thinks)
    (choice,) = reply.choices
    assert choice.message.reasoning_content == " ".join(words[:4])
    assert choice.message.content == " ".join(words[5:]), "the script goes on behind the marker"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 5
    (early,) = both(hermes, "Hm.</think>Yes, indeed.", tools=[], extra_body=thinks).choices
    assert (early.message.reasoning_content, early.message.content) == ("Hm.", "Yes, indeed.")
    (mine,) = both(
        hermes, "<think> one two three four five six", tools=[], n=1, extra_body={"thinking_token_budget": 3}
    ).choices
    assert mine.message.reasoning_content == "one two three"
    body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": " " + " ".join(words)}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 4}}
    thinking, text = httpx.post(f"{system.url}/v1/messages", json=body, timeout=60).json()["content"]
    assert (thinking["thinking"], text["text"]) == (" ".join(words[:4]), " ".join(words[5:]))


def test_lost_services_before_the_bound_of_reasoning_change_nothing(hermes: openai.OpenAI, system: Steered) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": " so" * 600}], "tools": [], "max_tokens": 500}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 300}
    content, reasoning = "", ""
    with system.struck([lambda: lose_services(system)], steps=60):
        for chunk in hermes.chat.completions.create(**asked, stream=True, extra_body=thinks):
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            content += chunk.choices[0].delta.content or ""
    assert (reasoning.count("so"), content.count("so")) == (300, 199)


def test_channels_of_gpt_oss(harmony: openai.OpenAI) -> None:
    reply = both(harmony, "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant" + EXAMPLES["harmony"])
    (choice,) = reply.choices
    assert choice.message.reasoning_content == "Where?" and choice.message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [PARIS, {}]
    assert 4 <= reply.usage.completion_tokens_details.reasoning_tokens <= 12
    (plain,) = both(harmony, "<|channel|>final<|message|>Paris.", tools=[]).choices
    assert plain.message.content == "Paris." and plain.finish_reason == "stop"

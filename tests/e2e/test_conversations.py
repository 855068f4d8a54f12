"""OpenAI's SDK at /v1/responses, and Anthropic's form of a chat, on services whose model writes what it is told to."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.common.dialects.reading import EXAMPLES, PARIS, TIME, WEATHER
from tests.e2e.scripted import scripted
from tests.e2e.steered import LIMIT_S, Steered
from tests.services.api.test_typed_events import events

TOOLS: list[Any] = [{"type": "function", **each["function"]} for each in (WEATHER, TIME)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    path = tmp_path_factory.mktemp("responses") / "model"
    settings = ("services.api.replicas=2", "worker.step_us=2000", "links.heartbeat_s=0.2")
    with scripted(path, "<tool_call> <think>", ("<think>", "</think>"), *settings) as system:
        yield system


@pytest.fixture(scope="module")
def client(system: Steered) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=5, timeout=60)


def shown(item: Any) -> Any:
    """Without ids, which differ."""
    return item.model_dump(exclude={"id", "call_id"}, exclude_none=True)


def test_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"input": "<think>\nWhere?\n</think>\n\n" + EXAMPLES["hermes"], "tools": TOOLS}
    whole = client.responses.create(model="m", **asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.status == "completed" and whole.output_text == "Let me see."
    call = whole.output[2]
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == PARIS
    with client.responses.stream(model="m", **asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [shown(item) for item in final.output] == [shown(item) for item in whole.output]
    assert final.usage == whole.usage and final.usage is not None
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
    assert [event.type for event in events][:3] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == "response.completed"


def test_a_conversation_that_the_server_remembers(client: openai.OpenAI) -> None:
    asked = {"model": "m", "tools": TOOLS, "instructions": "be brief", "metadata": {"a": "b"}}
    first = client.responses.create(input=EXAMPLES["hermes"], **asked)
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    script: Any = {"role": "user", "content": "It is sunny."}
    second = client.responses.create(input=[result, script], previous_response_id=first.id, **asked)
    assert second.output_text == "It is sunny." and second.previous_response_id == first.id
    assert first.usage and second.usage and second.usage.input_tokens > first.usage.input_tokens
    kept = client.responses.retrieve(second.id)
    assert kept == second and kept.metadata == {"a": "b"}
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["function_call_output", "message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="m", input="x", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"


def test_in_the_background_though_the_api_dies(system: Steered, client: openai.OpenAI) -> None:
    """Both replicas, when all responses have been begun and none has ended."""
    text = "word " * 100
    end_s = time.monotonic() + LIMIT_S
    with system.struck([lambda: [system.kill("api", number) for number in range(2)]], steps=50, sequences=8):
        made = [client.responses.create(model="m", input=text, background=True) for _ in range(8)]
        assert {each.status for each in made} == {"queued"}
        await_ends(client, made, end_s)
    for each in made:
        now = get(client, each.id)
        assert now.status == "completed" and now.output_text.split() == text.split(), now
        assert now.id == each.id and now.background and now.created_at == each.created_at


def await_ends(client: openai.OpenAI, made: list[Any], end_s: float) -> None:
    for each in made:
        while (now := get(client, each.id)).status in ("queued", "in_progress"):
            assert time.monotonic() < end_s, now
            time.sleep(0.1)


def get(client: openai.OpenAI, identity: str) -> Any:
    """Once an API is there again."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return client.responses.retrieve(identity)
        except openai.APIConnectionError:
            assert time.monotonic() < end_s
            time.sleep(0.1)


def test_cancelled_in_the_background(system: Steered, client: openai.OpenAI) -> None:
    system.allow(9)
    made = client.responses.create(model="m", input="word " * 100, background=True)
    assert client.responses.cancel(made.id).status == "cancelled"
    system.allow(None)
    assert get(client, made.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model="m", input="x").id)


def test_anthropics_messages(system: Steered) -> None:
    script = "<think>\nWhere?\n</think>\n\n" + EXAMPLES["hermes"]
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": script}], "tools": [tool]}
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=system.url, headers=headers, timeout=60) as http:
        counted = http.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"]
        whole = http.post("/v1/messages", json=asked | {"max_tokens": 500}).json()
        told = events(http.post("/v1/messages", json=asked | {"max_tokens": 500, "stream": True}).text)
        cut = http.post(
            "/v1/messages", json={**asked, "tools": [], "max_tokens": 500, "stop_sequences": ["see"]}
        ).json()
    assert [block["type"] for block in whole["content"][:3]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == PARIS and whole["stop_reason"] == "tool_use"
    usage = whole["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    start = told[0]["message"]["usage"]
    assert told[0]["type"] == "message_start" and start["input_tokens"] == counted, "known before the text"
    assert told[-1]["type"] == "message_stop" and told[-2]["usage"]["output_tokens"] == usage["output_tokens"]
    texts: dict[int, str] = {}
    for event in told:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
            texts[event["index"]] = texts.get(event["index"], "") + text
    assert (texts[0], texts[1], json.loads(texts[2])) == ("Where?", "Let me see.", PARIS)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "see")

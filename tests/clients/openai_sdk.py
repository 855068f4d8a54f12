"""OpenAI's SDK, 1.x, 2.x and 3.x alike, against a running server: `pip install openai`; see tests/clients/checks.py."""

import json
import sys
from typing import Any

import openai

from tests.clients.checks import MODEL, WEATHER, run

SAY: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
SHORT: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def models(url: str) -> None:
    listed = client(url).models.list().data
    assert [model.id for model in listed] == [MODEL] and client(url).models.retrieve(MODEL).id == MODEL


def chat(url: str) -> None:
    raw = client(url).chat.completions.with_raw_response.create(messages=SAY, **SHORT)
    reply = raw.parse()
    assert raw.headers["x-request-id"] and reply.choices[0].finish_reason == "length", reply
    assert reply.usage is not None and reply.usage.completion_tokens == 4 and reply.choices[0].message.content


def chat_stream(url: str) -> None:
    whole = client(url).chat.completions.create(messages=SAY, **SHORT)
    asked: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client(url).chat.completions.create(messages=SAY, **asked, **SHORT))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert text == whole.choices[0].message.content and ends == ["length"], (text, ends)
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def logprobs(url: str) -> None:
    choice = client(url).chat.completions.create(messages=SAY, logprobs=True, top_logprobs=2, **SHORT).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 4
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)


def tools(url: str) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 60, "messages": SAY, "tools": [TOOL]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    (call,) = client(url).chat.completions.create(**asked).choices[0].message.tool_calls or [None]
    assert call is not None and call.function.name == "weather" and "city" in json.loads(call.function.arguments)
    names, arguments, ids = [], "", set()
    for chunk in client(url).chat.completions.create(stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or []:
            names += [delta.function.name] if delta.function.name else []
            ids |= {delta.id} if delta.id else set()
            arguments += delta.function.arguments or ""
    assert (names, len(ids)) == (["weather"], 1) and arguments == call.function.arguments
    turns = [*SAY, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert client(url).chat.completions.create(messages=[*turns, result], tools=[TOOL], **SHORT).choices


def structured(url: str) -> None:
    named = {"name": "weather", "schema": WEATHER, "strict": True}
    shape: Any = {"type": "json_schema", "json_schema": named}
    asked: Any = {"model": MODEL, "max_tokens": 40, "messages": SAY, "response_format": shape, "seed": 1}
    reply = client(url).chat.completions.create(**asked)
    assert json.loads(reply.choices[0].message.content or "")["city"] in ("Rome", "Oslo"), reply


def completions(url: str) -> None:
    choices = client(url).completions.create(prompt=["One, two,", "Three,"], echo=True, **SHORT).choices
    assert [choice.index for choice in choices] == [0, 1] and choices[0].text.startswith("One, two,")
    (of_ids,) = client(url).completions.create(prompt=[1, 2, 3], logprobs=1, echo=True, **SHORT).choices
    assert of_ids.logprobs is not None and len(of_ids.logprobs.token_logprobs or []) == 3 + 4
    pieces = [c.choices[0].text for c in client(url).completions.create(prompt="One, two,", stream=True, **SHORT)]
    assert "One, two," + "".join(pieces) == choices[0].text


def responses(url: str) -> None:
    if not hasattr(client(url), "responses"):
        return  # openai before 1.66
    asked: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0}
    first = client(url).responses.create(**asked)
    kinds = [event.type for event in client(url).responses.create(stream=True, **asked)]
    assert first.output_text and kinds[0] == "response.created" and kinds[-1] == "response.incomplete", kinds
    assert client(url).responses.create(previous_response_id=first.id, **asked).output_text
    assert client(url).responses.retrieve(first.id).id == first.id


def embeddings(url: str) -> None:
    texts, more = ["Rome", "Oslo", "Rome"], dict[str, Any](model=MODEL)
    packed = client(url).embeddings.create(input=texts, **more)  # asks for base64 by itself
    plain = client(url).embeddings.create(input=texts, encoding_format="float", **more)
    assert [each.embedding for each in packed.data] == [each.embedding for each in plain.data]
    assert [each.index for each in packed.data] == [0, 1, 2] and packed.data[0].embedding == packed.data[2].embedding
    assert packed.data[0].embedding != packed.data[1].embedding and packed.usage.prompt_tokens
    ids = client(url).embeddings.create(input=[[1, 2, 3], [4]], **more)
    assert len(ids.data) == 2 and ids.usage.total_tokens == 4


def errors(url: str) -> None:
    for kind, fields in (
        (openai.NotFoundError, {"model": "another"}),
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "a " * 9000}]}),
    ):
        refusal: Any = None
        try:
            client(url).chat.completions.create(**({"messages": SAY} | SHORT | fields))
        except kind as error:
            refusal = error
        assert refusal is not None and refusal.body["message"] and refusal.request_id, fields


if __name__ == "__main__":
    checks = (models, chat, chat_stream, logprobs, tools, structured, completions, responses, embeddings, errors)
    sys.exit(run("openai", *checks))

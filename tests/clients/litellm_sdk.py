"""LiteLLM's provider `hosted_vllm` against a running server: `pip install litellm`; see tests/clients/checks.py."""

import json
import sys
from typing import Any

import litellm

from tests.clients.checks import MODEL, WEATHER, run

SAY: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def asked(url: str, **fields: Any) -> dict[str, Any]:
    base = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    return base | {"messages": SAY, "temperature": 0, "max_tokens": 4} | fields


def models(url: str) -> None:
    listed = litellm.get_valid_models(True, "hosted_vllm", api_key="none", api_base=f"{url}/v1")
    assert listed == [MODEL], listed


def chat(url: str) -> None:
    reply: Any = litellm.completion(**asked(url, logprobs=True, top_logprobs=2))
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 4
    assert len(reply.choices[0].logprobs.content) == 4


def chat_stream(url: str) -> None:
    whole: Any = litellm.completion(**asked(url))
    chunks: Any = list(litellm.completion(**asked(url, stream=True, stream_options={"include_usage": True})))
    built: Any = litellm.stream_chunk_builder(chunks, messages=SAY)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == 4 and built.choices[0].finish_reason == "length"


def tools(url: str) -> None:
    fields = asked(url, max_tokens=60, tools=[TOOL], tool_choice="required")
    whole: Any = litellm.completion(**fields)
    chunks: Any = list(litellm.completion(stream=True, **fields))
    streamed: Any = litellm.stream_chunk_builder(chunks, messages=SAY)
    calls = [reply.choices[0].message.tool_calls[0].function for reply in (whole, streamed)]
    assert calls[0].arguments == calls[1].arguments and json.loads(calls[0].arguments)["city"]
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason


def structured(url: str) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    reply: Any = litellm.completion(**asked(url, max_tokens=40, response_format=shape))
    assert json.loads(reply.choices[0].message.content)["city"] in ("Rome", "Oslo")


def completions(url: str) -> None:
    fields = asked(url, prompt="One, two,")
    del fields["messages"]
    assert litellm.text_completion(**fields).choices[0].text


def anthropic_form(url: str) -> None:
    reply: Any = litellm.completion(**asked(url, model=f"anthropic/{MODEL}", api_base=url))
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 4


def responses(url: str) -> None:
    fields = asked(url, input="Count to a hundred.", max_output_tokens=4)  # it makes 16 of less
    for name in ("messages", "max_tokens"):
        del fields[name]
    reply: Any = litellm.responses(**fields)
    assert reply.status == "incomplete" and reply.usage.output_tokens == 16, reply


def errors(url: str) -> None:
    long = [{"role": "user", "content": "a " * 9000}]
    for kind, fields in (
        (litellm.NotFoundError, {"model": "hosted_vllm/another"}),
        (litellm.BadRequestError, {"temperature": 9}),
        (litellm.ContextWindowExceededError, {"messages": long}),
    ):
        refusal: Any = None
        try:
            litellm.completion(**asked(url, **fields))
        except kind as error:
            refusal = error
        assert type(refusal) is kind, (kind, refusal)


if __name__ == "__main__":
    checks = (models, chat, chat_stream, tools, structured, completions, anthropic_form, responses, errors)
    sys.exit(run("litellm", *checks))

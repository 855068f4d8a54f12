"""LangChain's ChatOpenAI against a running server: `pip install langchain-openai`; see tests/clients/checks.py."""

import sys
from typing import Any, Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.checks import MODEL, run


class Place(BaseModel):
    """Where it is."""

    city: Literal["Rome", "Oslo"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(url: str, **fields: Any) -> ChatOpenAI:
    asked: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**(asked | {"temperature": 0, "max_tokens": 4} | fields))


def chat(url: str) -> None:
    reply = model(url).invoke("What is the capital of France?")
    assert reply.content and reply.response_metadata["finish_reason"] == "length"
    assert reply.usage_metadata is not None and reply.usage_metadata["output_tokens"] == 4


def chat_stream(url: str) -> None:
    whole = model(url).invoke("What is the capital of France?")
    chunks = list(model(url, stream_usage=True).stream("What is the capital of France?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content and total.response_metadata["finish_reason"] == "length"
    assert total.usage_metadata is not None and total.usage_metadata["output_tokens"] == 4


def batch(url: str) -> None:
    replies = model(url).batch(["One", "Two", "Three"])
    assert len(replies) == 3 and all(reply.content for reply in replies)


def logprobs(url: str) -> None:
    reply = model(url, logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(reply.response_metadata["logprobs"]["content"]) == 4


def tools(url: str) -> None:
    bound = model(url, max_tokens=60).bind_tools([weather], tool_choice="weather", strict=True)
    asked = HumanMessage("How is the weather in Rome?")
    reply: AIMessage = bound.invoke([asked])
    (call,) = reply.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model(url).bind_tools([weather]).invoke([asked, reply, result]).response_metadata["finish_reason"]


def structured(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        place = model(url, max_tokens=60).with_structured_output(Place, method=method).invoke("Where is it?")
        assert isinstance(place, Place), (method, place)


def completions(url: str) -> None:
    text = OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=4, temperature=0)  # type: ignore[call-arg,arg-type]
    assert text.invoke("One, two,") == "".join(text.stream("One, two,"))


def responses(url: str) -> None:
    assert model(url, use_responses_api=True, max_tokens=4).invoke("Hello").text
    chunks = list(model(url, use_responses_api=True, max_tokens=4).stream("Hello"))
    assert "".join(chunk.text for chunk in chunks)


def errors(url: str) -> None:
    refusal: Any = None
    try:
        model(url).invoke("a " * 9000)
    except ContextOverflowError as error:
        refusal = error
    assert refusal is not None


if __name__ == "__main__":
    sys.exit(
        run("langchain-openai", chat, chat_stream, batch, logprobs, tools, structured, completions, responses, errors)
    )

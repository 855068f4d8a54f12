"""OpenAI's agents, over chats and over responses: `pip install openai-agents`; see tests/clients/checks.py."""

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.checks import MODEL, run

ASKED: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return "sunny"


def agent(url: str, kind: Any, **settings: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    limits = ModelSettings(**({"temperature": 0, "max_tokens": 4} | settings))
    return Agent(name="a", model=kind(MODEL, client), model_settings=limits)


def answer(url: str, kind: Any) -> None:
    # long enough to end by itself: of responses that max_tokens cut, the client makes an error
    able = agent(url, kind, max_tokens=40)
    result = asyncio.run(Runner.run(able, "Hello"))
    assert result.final_output and result.raw_responses[0].usage.output_tokens, result

    async def streamed() -> str:
        result = Runner.run_streamed(agent(url, kind, max_tokens=40), "Hello")
        events = [event async for event in result.stream_events()]
        assert any(event.type == "raw_response_event" for event in events)
        return str(result.final_output)

    assert asyncio.run(streamed()) == result.final_output


def call_tool(url: str, kind: Any) -> None:
    ASKED.clear()
    able = agent(url, kind, max_tokens=40, tool_choice="weather")
    able.tools, able.tool_use_behavior = [weather], "stop_on_first_tool"
    result = asyncio.run(Runner.run(able, "How is the weather in Rome?"))
    assert len(ASKED) == 1 and result.final_output == "sunny", (ASKED, result)


def chats(url: str) -> None:
    answer(url, OpenAIChatCompletionsModel)


def responses(url: str) -> None:
    answer(url, OpenAIResponsesModel)


def tools_of_chats(url: str) -> None:
    call_tool(url, OpenAIChatCompletionsModel)


def tools_of_responses(url: str) -> None:
    call_tool(url, OpenAIResponsesModel)


if __name__ == "__main__":
    set_tracing_disabled(True)
    sys.exit(run("openai-agents", chats, responses, tools_of_chats, tools_of_responses))

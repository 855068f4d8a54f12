"""Requests that cost more than they look: a 400 that names the field before anything is computed, and others go on."""

from typing import Any

import pytest

from tests.services.api.system import CHAT, COMPLETION, running, scenario

DEEP: Any = 1
for _ in range(70):
    DEEP = [DEEP]
USER = {"role": "user", "content": "x"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": DEEP}}}
CALLER = {"role": "assistant", "tool_calls": [CALL]}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "messages": [USER] * 41}, "messages"),
    ("/tokenize", {"messages": [USER] * 41}, "messages"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}] * 5000}]},
        "messages",
    ),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALL] * 1025}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": [CALLER]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": [{**USER, "name": "x" * 2000}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs"),
    ("/v1/completions", {**COMPLETION, "stop": ["x"] * 65}, "stop"),
    ("/v1/completions", {**COMPLETION, "stop": "x" * 1025}, "stop"),
    ("/v1/completions", {**COMPLETION, "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ("/v1/completions", {**COMPLETION, "n": 129}, "n"),
    ("/v1/completions", {**COMPLETION, "n": 1025}, "n"),
    ("/v1/completions", {**COMPLETION, "prompt": ["x"] * 129}, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [1] * 1_000_000}, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [[1] * 1_000_000]}, "prompt"),
    ("/detokenize", {"tokens": [1] * 1_000_001}, "tokens"),
    ("/v1/completions", {**COMPLETION, "cache_salt": "x" * 1025}, "cache_salt"),
]


@pytest.mark.parametrize(("path", "body", "field"), CASES, ids=[f"{case[2]}-{i}" for i, case in enumerate(CASES)])
def test_too_much_of_something_names_it(path: str, body: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with running("api.max_messages=40") as (system, client):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, answer.text[:300]
            error = answer.json()["error"]
            assert error["param"].partition("[")[0].partition(".")[0] == field
            assert len(error["message"]) < 500
            (tokenizer,) = system.tokenizers
            assert tokenizer.submits == []
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


def test_just_enough_is_served() -> None:
    async def main() -> None:
        async with running("api.max_messages=40") as (_, client):
            assert (
                await client.post("/v1/chat/completions", json={**CHAT, "messages": [USER] * 40})
            ).status_code == 200
            body = {**COMPLETION, "stop": ["x"] * 64, "logit_bias": {str(i): 1 for i in range(900)}}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    scenario(main)


def test_json_that_nests_without_end_is_told() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for field in ("metadata", "response_format", "functions", "unknown", "chat_template_kwargs"):
                content = b'{"messages": [], "%s": %s' % (field.encode(), b"[" * 200_000)
                answer = await client.post("/v1/chat/completions", content=content)
                assert answer.status_code == 400
                assert (await client.get("/health/live")).status_code == 200

    scenario(main)

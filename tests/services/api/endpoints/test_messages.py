"""/v1/messages over HTTP, through the real API process with a tokenizer that answers."""

from typing import Any

import pytest

from common.protocol import TextFormat
from tests.services.api.system import rows, running, scenario
from tests.services.api.test_typed_events import events

PATH = "/v1/messages"
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}


def test_whole_and_streamed() -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]

            def answer(submit: Any) -> None:
                assert submit.options.tell_prompt == streams
                told = TextFormat(submit.seq_id, prompt_tokens=7)
                tokenizer.send(rows().__class__(b"", b"", b"", [], [], formats=[told]))
                tokenizer.answer(submit)

            tokenizer.on_submit = answer
            streams = False
            headers = {"anthropic-version": "2023-06-01"}
            whole = (await client.post(PATH, json=ASKED | {"system": "s"}, headers=headers)).json()
            assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
            assert whole["content"] == [{"type": "text", "text": " t0 t1", "citations": None}]
            assert (whole["stop_reason"], whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (
                "max_tokens",
                3,
                2,
            )
            streams = True
            told = events((await client.post(PATH, json=ASKED | {"stream": True})).text)
            assert told[0]["message"]["usage"]["input_tokens"] == 7, "known before the text"
            assert told[-1] == {"type": "message_stop"} and told[-2]["usage"] == whole["usage"]

    scenario(main)


def test_tokens_are_counted_without_running_anything() -> None:
    async def main() -> None:
        async with running() as (system, client):
            body = {name: value for name, value in ASKED.items() if name != "max_tokens"}
            answer = await client.post(f"{PATH}/count_tokens", json=body)
            told = len('[{"role":"user","content":"hi"}]')  # the tokenizer here has a token for each character
            assert answer.json() == {"input_tokens": told} and not system.tokenizers[0].submits

    scenario(main)


@pytest.mark.parametrize(
    ("fields", "headers", "status", "kind", "text"),
    [
        ({"max_tokens": None}, {}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, {}, 404, "not_found_error", "other"),
        ({}, {"anthropic-version": "2023-01-01"}, 400, "invalid_request_error", "anthropic-version"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, 400, "invalid_request_error", "image"),
    ],
)
def test_refusals_in_anthropics_words(
    fields: dict[str, Any], headers: dict[str, str], status: int, kind: str, text: str
) -> None:
    async def main() -> None:
        async with running() as (system, client):
            answer = await client.post(PATH, json=ASKED | fields, headers=headers)
            body = answer.json()
            assert answer.status_code == status and body["type"] == "error" and body["error"]["type"] == kind
            assert text in body["error"]["message"] and body["request_id"] == answer.headers["x-request-id"]
            assert not system.tokenizers[0].submits

    scenario(main)

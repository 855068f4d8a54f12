"""Streams of typed events over HTTP: framing, one terminal, and what happens when somebody leaves."""

import json
from typing import Any

import pytest

from common.protocol import FinishReason, Submit
from services.api.typed_events import encoded
from tests.services.api.system import rows, running, scenario

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "tiny", "input": "hi", "stream": True},
    MESSAGES: {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    },
}
TERMINALS = {
    RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
    MESSAGES: ("message_stop", "error"),
}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


def events(text: str) -> list[dict[str, Any]]:
    """Checks the framing: a name that is the type, one line of data, nothing else."""
    found = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_event_is_its_name_and_one_line() -> None:
    assert encoded([{"type": "a.b", "text": "x\n\ny"}]) == b'event: a.b\ndata: {"type":"a.b","text":"x\\n\\ny"}\n\n'


@BOTH
def test_a_failure_in_the_stream_is_the_one_terminal(path: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]
            submits: list[Submit] = []

            def begin(submit: Submit) -> None:
                submits.append(submit)
                tokenizer.send(rows((submit.seq_id, 0, 1, "half")))

            tokenizer.on_submit = begin
            async with client.stream("POST", path, json=BODIES[path]) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    if not text:
                        tokenizer.finish(submits[0].seq_id, 1, FinishReason.ERROR, message="the device is gone")
                    text += piece
            types = [event["type"] for event in events(text)]
            assert [kind for kind in types if kind in TERMINALS[path]] == types[-1:]
            assert types[-1] in ("response.failed", "error") and "the device is gone" in text

    scenario(main)


@BOTH
def test_a_failure_before_the_stream_has_its_status(path: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]
            tokenizer.on_submit = lambda submit: tokenizer.refuse(submit, "overloaded", "full")
            answer = await client.post(path, json=BODIES[path])
            assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
            assert ("request_id" in answer.json()) == (path == MESSAGES) and answer.headers["retry-after"]

    scenario(main)


@BOTH
def test_who_leaves_aborts(path: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]
            submits: list[Submit] = []

            def begin(submit: Submit) -> None:
                submits.append(submit)
                tokenizer.send(rows((submit.seq_id, 0, 1, "a")))

            tokenizer.on_submit = begin
            async with client.stream("POST", path, json=BODIES[path]) as answer:
                await anext(answer.aiter_bytes())
            await system.until(lambda: bool(tokenizer.aborts))
            assert tokenizer.aborts == [submits[0].seq_id] and not system.gateway.hub.choices

    scenario(main)


@BOTH
def test_a_long_silence_has_signs_of_life(path: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]
            submits: list[Submit] = []

            def begin(submit: Submit) -> None:
                submits.append(submit)
                tokenizer.send(rows((submit.seq_id, 0, 1, "a")))

            tokenizer.on_submit = begin
            async with client.stream("POST", path, json=BODIES[path]) as answer:
                pieces = answer.aiter_text()
                text = await anext(pieces)
                while "a" not in text:
                    text += await anext(pieces)
                (request,) = system.gateway.hub.requests()
                assert request.consumer is not None
                request.consumer.keep_alive()
                text = await anext(pieces)
                assert text in (": keep-alive\n\n", 'event: ping\ndata: {"type":"ping"}\n\n')
                tokenizer.finish(submits[0].seq_id, 1)
                async for piece in pieces:
                    text += piece
            assert events(text)[-1]["type"] in TERMINALS[path]

    scenario(main)


@BOTH
def test_whole_and_streamed_cost_the_same_tokens(path: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            for stream in (True, False):
                answer = await client.post(path, json=BODIES[path] | {"stream": stream})
                assert answer.status_code == 200, answer.text
            assert len(system.tokenizers[0].submits) == 2
            assert system.gateway.bodies.held == 0 and not system.gateway.hub.choices

    scenario(main)

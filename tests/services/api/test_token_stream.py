"""From token ids to token ids as a stream: what it adds up to, its end, and what is refused or fails on the way."""

from typing import Any

import pytest
from msgspec.structs import replace

from common.columns import pack_i32
from common.protocol import FinishReason, Submit, TextFinished, TextFormat
from tests.services.api.system import FakeTokenizer, rows, running, scenario
from tests.services.api.test_generate import payloads

PATH = "/inference/v1/generate"
ASKED: dict[str, Any] = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "n": 2}, "request_id": "r1"}


def answering(tokenizer: FakeTokenizer, reason: FinishReason = FinishReason.LENGTH) -> None:
    """Two choices of three tokens, the last ones with their ends or before them."""

    def answer(submit: Submit) -> None:
        told = [TextFormat(submit.seq_id, prompt=submit.tokens)]
        one, two = submit.seq_id, submit.seq_id + 1
        tokenizer.send(replace(rows((one, 0, 2, "ab")), formats=told, ids={one: (0, pack_i32([7, 8]))}))
        tokenizer.send(replace(rows((one, 2, 1, "c")), ids={one: (2, pack_i32([9]))}))
        ended = TextFinished(two, reason, 2, 3, message="why")
        tokenizer.send(replace(rows((two, 0, 3, "def"), finished=(ended,)), ids={two: (0, pack_i32([4, 3, 2]))}))
        tokenizer.send(rows(finished=(TextFinished(one, FinishReason.EOS, 2, 3),)))

    tokenizer.on_submit = answer


def test_it_adds_up_to_the_whole_reply() -> None:
    async def main() -> None:
        async with running() as (system, client):
            answering(system.tokenizers[0])
            whole = (await client.post(PATH, json=ASKED)).json()
            more = {"stream": True, "stream_options": {"include_usage": True}}
            *parts, usage, done = payloads((await client.post(PATH, json=ASKED | more)).text)
            assert done == "[DONE]" and usage["usage"] == whole["usage"] and usage["choices"] == []
            assert all(part["request_id"] == "r1" and len(part["choices"]) == 1 for part in parts)
            for choice in whole["choices"]:
                mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
                assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
                ends = [part["finish_reason"] for part in mine]
                assert ends == [None] * (len(mine) - 1) + [choice["finish_reason"]]
            plain = payloads((await client.post(PATH, json=ASKED | {"stream": True})).text)
            assert plain[-1] == "[DONE]" and not any(part.get("usage") for part in plain[:-1])

    scenario(main)


def test_a_failure_is_the_last_event() -> None:
    async def main() -> None:
        async with running() as (system, client):
            answering(system.tokenizers[0], FinishReason.ERROR)
            *parts, last = payloads((await client.post(PATH, json=ASKED | {"stream": True})).text)
            assert last["error"]["message"] and all("choices" in part for part in parts)

    scenario(main)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with running() as (_, client):
            reply = await client.post(PATH, json=ASKED | fields)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param

    scenario(main)

"""Requests as token ids, over HTTP; the tokenizer here has a token for each character."""

from msgspec.structs import replace

from common.columns import pack_i32
from common.protocol import PromptKind, Submit, TextFormat
from tests.services.api.system import CHAT, COMPLETION, rows, running, scenario

MESSAGES = '[{"role":"user","content":"hi"}]'


def test_what_requests_render_to() -> None:
    async def main() -> None:
        async with running() as (system, client):
            chat = (await client.post("/v1/chat/completions/render", json=CHAT | {"request_id": "r"})).json()
            assert chat["token_ids"] == list(map(ord, MESSAGES)) and chat["request_id"] == "r"
            assert chat["sampling_params"] == {"max_tokens": 128 - len(MESSAGES)}
            texts = (await client.post("/v1/completions/render", json=COMPLETION | {"prompt": ["ab", "c"]})).json()
            assert [each["token_ids"] for each in texts] == [[97, 98], [99]]
            given = (await client.post("/v1/completions/render", json=COMPLETION | {"prompt": [5, 6]})).json()
            assert given[0]["token_ids"] == [5, 6] and not system.tokenizers[0].submits
            wrong = await client.post("/v1/chat/completions/render", json=CHAT | {"temperature": 9})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"

    scenario(main)


def test_from_ids_to_ids() -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]

            def answer(submit: Submit) -> None:
                assert submit.kind is PromptKind.TOKENS and submit.options.token_ids
                ids = {submit.seq_id: (0, pack_i32([7, 8]))}
                told = [TextFormat(submit.seq_id, prompt=submit.tokens)]
                tokenizer.send(replace(rows((submit.seq_id, 0, 2, "xy")), formats=told, ids=ids))
                tokenizer.finish(submit.seq_id, 2)

            tokenizer.on_submit = answer
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "request_id": "r1"}
            reply = (await client.post("/inference/v1/generate", json=body)).json()
            assert reply["request_id"] == "r1" and reply["choices"][0]["token_ids"] == [7, 8]
            assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 2

    scenario(main)


def test_about_the_tokenizer() -> None:
    async def main() -> None:
        async with running() as (_, client):
            assert (await client.get("/tokenizer_info")).json() == {"eos_token": "</s>"}

    scenario(main)

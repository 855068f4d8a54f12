from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from common.pooling import Embedding
from common.protocol import FinishReason, Submit
from tests.services.api.system import FACTS, System, running, scenario


@asynccontextmanager
async def serving(*settings: str) -> AsyncIterator[tuple[System, httpx.AsyncClient]]:
    """Each text's vector is its length, and the inputs that were open when it came."""
    async with running(*settings) as (system, client):
        system.facts = msgspec.structs.replace(FACTS, embedding=Embedding(2))
        system.tell()
        await system.until(lambda: system.gateway.facts().embedding.size == 2)
        tokenizer = system.tokenizers[0]

        def answer(submit: Submit) -> None:
            vector = array("f", [len(submit.text), len(system.gateway.hub.choices)]).tobytes()
            tokenizer.finish(submit.seq_id, 0, FinishReason.EOS, vector=vector)

        tokenizer.on_submit = answer
        yield system, client


def test_inputs_keep_their_order_and_no_more_are_open_than_choices_may_be() -> None:
    async def main() -> None:
        async with serving("api.max_choices=4") as (_, client):
            texts = ["x" * (1 + number) for number in range(11)]
            answer = (await client.post("/v1/embeddings", json={"input": texts})).json()
            assert [each["index"] for each in answer["data"]] == list(range(11))
            assert [each["embedding"][0] for each in answer["data"]] == [len(text) for text in texts]
            assert max(each["embedding"][1] for each in answer["data"]) <= 4
            assert answer["usage"] == {"prompt_tokens": 77, "total_tokens": 77} and answer["object"] == "list"

    scenario(main)


def test_one_that_is_refused_ends_all_and_names_the_field() -> None:
    async def main() -> None:
        async with serving() as (system, client):
            tokenizer = system.tokenizers[0]

            def refuse(submit: Submit) -> None:
                if submit.text == "bad":
                    tokenizer.refuse(submit, "too_long", "the prompt is too long", "prompt")

            tokenizer.on_submit = refuse
            response = await client.post("/v1/embeddings", json={"input": ["a", "bad", "b"]})
            assert response.status_code == 400
            assert response.json()["error"] | {"type": ""} == {
                "message": "the input is too long",
                "type": "",
                "param": "input",
                "code": "context_length_exceeded",
            }
            await system.until(lambda: len(tokenizer.aborts) == 2)
            assert not system.gateway.hub.choices

    scenario(main)


def test_a_key_is_charged_for_all_inputs() -> None:
    async def main() -> None:
        async with serving("api.max_choices=2") as (system, client):
            charged: list[Any] = []
            handle = system.gateway.open

            def opened(*given: Any) -> Any:
                charged.append(handle(*given))
                return charged[-1]

            system.gateway.open = opened  # type: ignore[method-assign, assignment]
            await client.post("/v1/embeddings", json={"input": ["a"] * 5})
            assert [len(request.choices) for request in charged] == [2, 4, 5]

    scenario(main)


def test_an_abort_by_name() -> None:
    async def main() -> None:
        async with serving() as (system, client):
            system.tokenizers[0].on_submit = lambda submit: None
            asked = {"input": "a", "request_id": "mine"}
            answer, ended = await system_both(system, client, asked)
            assert answer.status_code == 499 and ended.status_code == 200

    scenario(main)


async def system_both(
    system: System, client: httpx.AsyncClient, asked: dict[str, Any]
) -> tuple[httpx.Response, httpx.Response]:
    import asyncio

    waiting = asyncio.ensure_future(client.post("/v1/embeddings", json=asked))
    await system.until(lambda: bool(system.gateway.hub.choices))
    ended = await client.post("/abort", json={"request_id": asked["request_id"]})
    return await waiting, ended

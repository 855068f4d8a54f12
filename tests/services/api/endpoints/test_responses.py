"""/v1/responses over HTTP, through the real API process with a tokenizer that answers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from common.protocol import Submit
from tests.services.api.system import LIMIT_S, running, scenario
from tests.services.api.test_typed_events import events

PATH = "/v1/responses"


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post(PATH, json={"model": "tiny", "input": "hi"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(client: httpx.AsyncClient, identity: str, *statuses: str) -> Any:
    async with asyncio.timeout(LIMIT_S):
        while (now := (await client.get(f"{PATH}/{identity}")).json())["status"] not in statuses:
            await asyncio.sleep(0.01)
        return now


def test_asked_kept_and_gone_on_from() -> None:
    async def main() -> None:
        async with running() as (system, client):
            first = await ask(client, instructions="be brief", max_output_tokens=2, user="u")
            assert (first["object"], first["status"], first["incomplete_details"]) == (
                "response",
                "incomplete",
                {"reason": "max_output_tokens"},
            )
            assert first["output"][0]["content"][0]["text"] == " t0 t1"
            assert (await client.get(f"{PATH}/{first['id']}")).json() == first
            await ask(client, input="more", previous_response_id=first["id"])
            submits = system.tokenizers[0].submits
            assert submits[0].sampling.max_tokens == 2
            assert [(each["role"], each["content"]) for each in json.loads(submits[1].messages)] == [
                ("user", "hi"),
                ("assistant", " t0 t1"),
                ("user", "more"),
            ], "instructions are not carried over"
            items = (await client.get(f"{PATH}/{first['id']}/input_items")).json()
            assert [item["content"][0]["text"] for item in items["data"]] == ["hi"] and items["data"][0]["id"]
            assert (await client.delete(f"{PATH}/{first['id']}")).json()["deleted"]
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                gone = await client.request(method, f"{PATH}/{first['id']}{path}")
                assert gone.status_code == 404 and gone.json()["error"]["param"] == "response_id"

    scenario(main)


def test_a_stream_is_kept_before_its_end_is_told() -> None:
    async def main() -> None:
        async with running() as (_, client):
            answer = await client.post(PATH, json={"input": "hi", "stream": True})
            last = events(answer.text)[-1]
            assert last["type"] == "response.incomplete"
            assert (await client.get(f"{PATH}/{last['response']['id']}")).json() == last["response"]
            await ask(client, previous_response_id=last["response"]["id"])
            unkept = await ask(client, store=False)
            assert unkept["store"] is False
            assert (await client.get(f"{PATH}/{unkept['id']}")).status_code == 404

    scenario(main)


def test_a_store_that_fails_costs_the_memory_not_the_answer() -> None:
    async def main() -> None:
        async with running() as (system, client):
            system.gateway.keeper.root = system.run_dir / "file" / "folder"
            (system.run_dir / "file").write_text("")
            answer = await ask(client)
            assert answer["store"] is False and answer["output"]
            refused = await client.post(PATH, json={"input": "hi", "background": True})
            assert refused.status_code == 503

    scenario(main)


def test_in_the_background() -> None:
    async def main() -> None:
        async with running() as (system, client):
            made = await ask(client, background=True, metadata={"a": "b"})
            assert made["status"] == "queued" and made["output"] == []
            done = await until(client, made["id"], "completed", "incomplete")
            assert done["output"][0]["content"][0]["text"] == " t0 t1 t2"
            same = ("id", "created_at", "background", "store", "metadata")
            assert {name: done[name] for name in same} == {name: made[name] for name in same}
            assert system.tokenizers[0].submits[0].priority == 0, "as live traffic"
            # It is cancelled while it is computed.
            held: list[Submit] = []
            system.tokenizers[0].on_submit = held.append
            made = await ask(client, background=True)
            await system.until(lambda: bool(held))
            early = await client.post(PATH, json={"input": "x", "previous_response_id": made["id"]})
            assert early.status_code == 400 and "is in_progress" in early.json()["error"]["message"]
            assert (await client.post(f"{PATH}/{made['id']}/cancel")).json()["status"] == "cancelled"
            await system.until(lambda: system.tokenizers[0].aborts == [held[0].seq_id])
            assert (await until(client, made["id"], "cancelled"))["output"] == []
            # What is refused when it is computed has failed.
            tokenizer = system.tokenizers[0]
            tokenizer.on_submit = lambda submit: tokenizer.refuse(submit, "too_long", "it is too long")
            made = await ask(client, background=True)
            failed = await until(client, made["id"], "failed")
            assert failed["error"] == {"code": "invalid_prompt", "message": "it is too long"}

    scenario(main)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].type"),
        ({"tools": [{"type": "function", "name": "no name"}]}, 400, "tools[0].name"),
        ({"temperature": 9, "background": True}, 400, "temperature"),
        ({"top_k": -5, "background": True}, 400, "top_k"),
    ],
)
def test_bad_input_changes_nothing(fields: dict[str, Any], status: int, param: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            answer = await client.post(PATH, json={"model": "tiny", "input": "hi"} | fields)
            assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text
            assert not system.tokenizers[0].submits and not system.gateway.hub.choices

    scenario(main)


def test_only_what_is_in_the_background_can_be_cancelled_and_nothing_kept_streams() -> None:
    async def main() -> None:
        async with running() as (_, client):
            made = await ask(client)
            answer = await client.post(f"{PATH}/{made['id']}/cancel")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_id"
            answer = await client.get(f"{PATH}/{made['id']}", params={"stream": "true"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"

    scenario(main)

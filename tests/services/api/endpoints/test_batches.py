"""/v1/batches over HTTP, through the real API process with a tokenizer that answers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from common.protocol import Submit
from tests.services.api.system import LIMIT_S, running, scenario


def line(name: str, url: str = "/v1/completions", **fields: Any) -> bytes:
    body = {"model": "tiny", "prompt": name, "max_tokens": 2} | fields
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode() + b"\n"


async def begin(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> httpx.Response:
    file = (await client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})).json()["id"]
    asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}}
    return await client.post("/v1/batches", json=asked)


async def until(client: httpx.AsyncClient, identity: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            batch: dict[str, Any] = (await client.get(f"/v1/batches/{identity}")).json()
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(0.01)


async def lines(client: httpx.AsyncClient, file: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await client.get(f"/v1/files/{file}/content")).content.splitlines()]


def test_from_the_input_to_the_output() -> None:
    async def main() -> None:
        async with running("api.batch_requests=3") as (system, client):
            system.load = system.load.__class__(running=3)
            content = b"".join(line(f"c{number}") for number in range(10)) + line("bad", model="other")
            made = (await begin(client, content)).json()
            assert (made["object"], made["status"], made["metadata"]) == ("batch", "validating", {"a": "b"})
            batch = await until(client, made["id"], "completed")
            assert batch["request_counts"] == {"total": 11, "completed": 10, "failed": 1}
            assert made["created_at"] <= batch["in_progress_at"] <= batch["completed_at"] < batch["expires_at"]
            output = await lines(client, batch["output_file_id"])
            assert [each["custom_id"] for each in output] == [f"c{number}" for number in range(10)]
            response = output[3]["response"]
            assert (response["status_code"], output[3]["error"]) == (200, None)
            assert (
                response["body"]["choices"][0]["text"] == " t0 t1" and response["body"]["object"] == "text_completion"
            )
            (failure,) = await lines(client, batch["error_file_id"])
            assert failure["custom_id"] == "bad" and failure["response"]["status_code"] == 404
            assert failure["response"]["body"]["error"]["param"] == "model"
            assert {submit.priority for submit in system.tokenizers[0].submits} == {100}, "behind all others"
            listed = (await client.get("/v1/batches")).json()
            assert [each["id"] for each in listed["data"]] == [batch["id"]]
            purposes = [each["purpose"] for each in (await client.get("/v1/files")).json()["data"]]
            assert sorted(purposes) == ["batch", "batch_output", "batch_output"]

    scenario(main)


def test_cancelled() -> None:
    async def main() -> None:
        async with running("api.batch_requests=1") as (system, client):
            system.load = system.load.__class__(running=3)
            held: list[Submit] = []
            tokenizer = system.tokenizers[0]
            tokenizer.on_submit = held.append
            identity = (await begin(client, line("a") + line("b"))).json()["id"]
            await system.until(lambda: bool(held))
            answer = await client.post(f"/v1/batches/{identity}/cancel")
            assert answer.json()["status"] == "cancelling"
            tokenizer.answer(held[0])
            batch = await until(client, identity, "cancelled")
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
            assert [each["custom_id"] for each in await lines(client, batch["output_file_id"])] == ["a"]
            (left,) = await lines(client, batch["error_file_id"])
            assert (left["custom_id"], left["error"]["code"], left["response"]) == ("b", "batch_cancelled", None)
            again = await client.post(f"/v1/batches/{identity}/cancel")
            assert again.status_code == 400 and "cancelled cannot be cancelled" in again.json()["error"]["message"]

    scenario(main)


def test_an_input_that_is_wrong_is_explained() -> None:
    async def main() -> None:
        async with running() as (_, client):
            identity = (await begin(client, line("a") + line("a"))).json()["id"]
            batch = await until(client, identity, "failed")
            assert [(each["code"], each["line"]) for each in batch["errors"]["data"]] == [("duplicate_custom_id", 2)]

    scenario(main)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-0"}, 404, "input_file_id"),
        ({"metadata": {"k": "v" * 600}}, 400, "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, 400, "output_expires_after"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(change: dict[str, Any], status: int, param: str) -> None:
    async def main() -> None:
        async with running() as (_, client):
            body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"} | change
            answer = await client.post("/v1/batches", json=body)
            assert answer.status_code == status and answer.json()["error"]["param"].startswith(param), answer.text
            for path in ("", "/cancel"):
                gone = await client.request("POST" if path else "GET", f"/v1/batches/batch-1{path}")
                assert gone.status_code == 404 and gone.json()["error"]["param"] == "batch_id"

    scenario(main)


def test_a_key_has_so_many_at_once() -> None:
    async def main() -> None:
        async with running("api.max_batches=1") as (system, client):  # with others waiting, so that none begins
            assert (await begin(client, line("a"))).status_code == 200
            answer = await begin(client, line("a"))
            assert answer.status_code == 429 and "1 batches have not ended" in answer.json()["error"]["message"]
            assert system.load.waiting

    scenario(main)

"""/v1/files over HTTP: what is kept, whose it is, and what is refused."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from common import api_keys
from tests.services.api.system import running, scenario

BATCH = {"purpose": "batch"}


async def upload(client: httpx.AsyncClient, content: bytes = b"abc", **fields: str) -> httpx.Response:
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=BATCH | fields)


def test_kept_listed_read_and_deleted() -> None:
    async def main() -> None:
        async with running() as (_, client):
            large = bytes(range(256)) * 4096
            made = (
                await upload(client, large, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
            ).json()
            assert (made["object"], made["bytes"], made["filename"], made["purpose"]) == (
                "file",
                len(large),
                "in.jsonl",
                "batch",
            )
            assert made["expires_at"] == made["created_at"] + 3600
            other = (await upload(client)).json()
            listed = (await client.get("/v1/files")).json()
            assert [each["id"] for each in listed["data"]] == [other["id"], made["id"]] and not listed["has_more"]
            page = (await client.get("/v1/files?order=asc&limit=1")).json()
            assert [each["id"] for each in page["data"]] == [made["id"]] and page["has_more"]
            rest = (await client.get(f"/v1/files?order=asc&after={made['id']}&purpose=batch")).json()
            assert [each["id"] for each in rest["data"]] == [other["id"]] and rest["first_id"] == other["id"]
            assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
            assert (await client.get(f"/v1/files/{made['id']}")).json() == made
            answer = await client.get(f"/v1/files/{made['id']}/content")
            assert answer.content == large and "in.jsonl" in answer.headers["content-disposition"]
            assert (await client.delete(f"/v1/files/{made['id']}")).json() == {
                "id": made["id"],
                "object": "file",
                "deleted": True,
            }
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                gone = await client.request(method, f"/v1/files/{made['id']}{path}")
                assert gone.status_code == 404 and gone.json()["error"]["param"] == "file_id"

    scenario(main)


FILE = {"file": ("a", b"abc")}
BOUNDARY = {"content-type": "multipart/form-data; boundary=x"}
HALF = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf of it'
EXPIRY = {"expires_after[anchor]": "created_at"}


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        ({"json": {"purpose": "batch"}}, 400, None),
        ({"files": FILE}, 400, "purpose"),
        ({"files": FILE, "data": {"purpose": "fine-tune"}}, 400, "purpose"),
        ({"files": {"other": ("a", b"abc")}, "data": BATCH}, 400, "file"),
        ({"files": FILE, "data": BATCH | EXPIRY}, 400, "expires_after[seconds]"),
        ({"files": FILE, "data": BATCH | EXPIRY | {"expires_after[seconds]": "12"}}, 400, "expires_after[seconds]"),
        ({"files": FILE, "data": BATCH | {"expires_after[seconds]": "3600"}}, 400, "expires_after[anchor]"),
        ({"files": {"file": ("a", b"x" * 100_000)}, "data": BATCH}, 413, None),
        ({"files": FILE, "data": BATCH | {"note": "x" * 5000}}, 400, None),
        ({"files": FILE, "data": BATCH | {f"f{number}": "" for number in range(20)}}, 400, None),
        ({"files": [("file", ("a", b"1")), ("file", ("b", b"2"))], "data": BATCH}, 400, "file"),
        ({"content": b"--x\r\nbroken", "headers": BOUNDARY}, 400, None),
        ({"content": b"", "headers": BOUNDARY}, 400, None),
        ({"content": HALF, "headers": BOUNDARY}, 400, None),
        ({"content": b"--x\r\na: b\r\n\r\nc\r\n--x--", "headers": BOUNDARY}, 400, None),
        ({"content": b"--x\r\n" + b"a" * 5000 + b": b\r\n\r\n", "headers": BOUNDARY}, 400, None),
    ],
)
def test_what_is_no_form_is_refused_and_leaves_nothing(
    request_: dict[str, Any], status: int, param: str | None
) -> None:
    async def main() -> None:
        async with running("api.max_file_bytes=1000") as (system, client):
            answer = await client.post("/v1/files", **request_)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
            assert (await client.get("/v1/files")).json()["data"] == []
            assert list((system.run_dir / "storage" / "arriving").iterdir()) == []

    scenario(main)


def test_the_disk_has_an_end() -> None:
    async def main() -> None:
        async with running("api.storage_bytes=1000", "api.max_file_bytes=900") as (_, client):
            assert (await upload(client, b"x" * 500)).status_code == 200
            answer = await upload(client, b"x" * 500)
            assert answer.status_code == 507 and "delete some" in answer.json()["error"]["message"]

    scenario(main)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "order=up", "after=nothing"])
def test_pages_that_cannot_be_are_refused(query: str) -> None:
    async def main() -> None:
        async with running() as (_, client):
            answer = await client.get(f"/v1/files?{query}")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]

    scenario(main)


def test_nobody_sees_the_files_of_another_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    secrets = {name: api_keys.make_secret() for name in ("one", "two")}
    made = [api_keys.make(name, secret) for name, secret in secrets.items()]
    keys.write_text("".join(json.dumps({"name": key.name, "salt": key.salt, "hash": key.hash}) + "\n" for key in made))
    keys.chmod(0o600)

    async def main() -> None:
        async with running(f"api.keys_file={keys}") as (_, client):
            one, two = ({"authorization": f"Bearer {secret}"} for secret in secrets.values())
            file = (await client.post("/v1/files", files=FILE, data=BATCH, headers=one)).json()["id"]
            assert (await client.get("/v1/files", headers=two)).json()["data"] == []
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content"):
                assert (await client.get(path, headers=two)).status_code == 404
                assert (await client.get(path, headers=one)).status_code == 200
            batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            answer = await client.post("/v1/batches", json=batch, headers=two)
            assert answer.status_code == 404 and answer.json()["error"]["param"] == "input_file_id"

    scenario(main)

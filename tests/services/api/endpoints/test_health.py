import asyncio

import msgspec

from common.protocol import Member, Peer
from tests.services.api.system import COMPLETION, LIMIT_S, running, scenario


def test_health_when_all_is_there() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for path, status in (
                ("/health", "ready"),
                ("/health/ready", "ready"),
                ("/ping", "ready"),
                ("/ready", "ready"),
                ("/health/live", "live"),
                ("/live", "live"),
                ("/health/progress", "progressing"),
                ("/progress", "progressing"),
            ):
                response = await client.get(path)
                assert response.status_code == 200 and response.json()["status"] == status
            assert (await client.get("/version")).json()["version"]

    scenario(main)


def test_health_tells_what_is_missing() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (_, client):
            assert (await client.get("/health/live")).status_code == 200
            for path in ("/health", "/health/ready"):
                response = await client.get(path)
                body = response.json()
                assert response.status_code == 503 and "retry-after" in response.headers
                assert body["missing"] == ["tokenizer"] and body["reason"] == "no tokenizer is ready"
                assert body["status"] == "unavailable" and body["error"]["code"] == "service_unavailable"

    scenario(main)


def test_a_process_that_stands_still_is_named() -> None:
    async def main() -> None:
        async with running("links.stalled_after_s=60") as (system, client):
            worker = Peer("worker", 0, 55, f"ipc://{system.run_dir}/nobody")
            system.members[55] = Member(worker, "ready", counters={"stalled_seconds": 61.0, "work_owed": 2.0})
            await system.until(lambda: bool(system.gateway.stalled()))
            assert (await client.get("/ready")).status_code == 200
            for path in ("/progress", "/health/progress", "/health"):
                answer = await client.get(path)
                assert answer.status_code == 503 and "retry-after" in answer.headers
                body = answer.json()
                assert (body["status"], body["missing"]) == ("stalled", ["worker-0"])
                assert body["reason"] == "worker-0: nothing done for 61 s, 2 waiting"
                assert body["error"]["code"] == "service_unavailable"
            system.members[55] = msgspec.structs.replace(system.members[55], counters={"stalled_seconds": 0.0})
            await system.until(lambda: not system.gateway.stalled())
            assert (await client.get("/health")).status_code == 200

    scenario(main)


def test_open_requests_for_which_nothing_comes_are_no_progress_and_rows_or_steps_are() -> None:
    async def main() -> None:
        async with running("links.stalled_after_s=0.2") as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            asking = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "max_tokens": 3}))
            await system.until(lambda: bool(tokenizer.submits))
            await system.until(lambda: bool(system.gateway.stalled()))
            body = (await client.get("/progress")).json()
            assert (body["status"], body["missing"]) == ("stalled", ["api-1"])
            assert body["reason"].startswith("api-1: nothing done for") and body["reason"].endswith("1 waiting")
            # The scheduler steps, though for others: this request waits its turn.
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/progress")).status_code != 200:
                    system.load = msgspec.structs.replace(system.load, steps=system.load.steps + 1)
            tokenizer.answer(tokenizer.submits[0])
            assert (await asking).status_code == 200

    scenario(main)

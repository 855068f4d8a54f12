import asyncio

from common.protocol import AbortNamed, Peer, Submit
from tests.services.api.system import CHAT, running, scenario


def test_a_request_is_ended_by_its_id() -> None:
    async def main() -> None:
        async with running() as (system, client):
            held: list[Submit] = []
            system.tokenizers[0].on_submit = held.append
            for name, how in (("mine", "mine"), ("other", "chatcmpl-other")):
                asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"request_id": name}))
                await system.until(lambda: bool(held))
                assert (await client.post("/abort", json={"request_id": "nobody"})).json()["aborted"] == 0
                reply = (await client.post("/abort", json={"request_id": how})).json()
                assert reply == {"request_id": how, "aborted": 1}
                answer = await asked
                assert answer.status_code == 499 and answer.json()["error"]["code"] == "request_aborted"
                await system.until(lambda: system.tokenizers[0].aborts[-1:] == [held[0].seq_id])
                held.clear()
            wrong = await client.post("/abort", json={})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "request_id"

    scenario(main)


def test_siblings_are_told_and_obey() -> None:
    async def main() -> None:
        async with running() as (system, client):
            held: list[Submit] = []
            system.tokenizers[0].on_submit = held.append
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"request_id": "mine"}))
            await system.until(lambda: bool(held))
            sent: list[object] = []
            sibling = Peer("api", 2, 77, "")
            gateway = system.gateway
            gateway.siblings = lambda: [sibling]  # type: ignore[method-assign]
            gateway.node.send = lambda to, message: sent.append((to, message)) is None  # type: ignore[method-assign]
            gateway.abort("elsewhere", "")
            assert sent == [(77, AbortNamed("elsewhere", ""))]
            own = gateway.node.process.incarnation
            gateway._receive([(own, AbortNamed("mine", "somebody else"))])
            assert gateway.hub.choices, "each key ends its own only"
            gateway._receive([(own, AbortNamed("mine", ""))])
            assert (await asked).status_code == 499

    scenario(main)


def test_load() -> None:
    async def main() -> None:
        async with running() as (system, client):
            load = (await client.get("/load")).json()
            assert (load["server_load"], load["running"], load["waiting"], load["kv_cache_usage"]) == (0, 3, 2, 0.4)
            system.gateway.siblings = lambda: [Peer("api", 2, 77, "")]  # type: ignore[method-assign]
            assert (await client.get("/load")).json()["server_load"] == 5, "they are the sibling's"
            held: list[Submit] = []
            system.tokenizers[0].on_submit = held.append
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"n": 6}))
            await system.until(lambda: bool(held))
            load = (await client.get("/load")).json()
            assert (load["server_load"], load["running"]) == (6, 3), "what no scheduler has told yet counts"
            asked.cancel()

    scenario(main)

import asyncio
import time
from typing import Any

import msgspec
import pytest

from common.columns import unpack_i32
from common.errors import Reject, RejectReason
from common.protocol import (
    Detokenize,
    Detokenized,
    Load,
    Member,
    Members,
    Peer,
    Progress,
    PromptKind,
    Tokenize,
    Tokenized,
)
from common.recorder import Kind
from common.transport import MAGIC
from services.api.schema.completion import BODY, submits_of
from tests.services.api.system import CHAT, COMPLETION, FACTS, rows, running, scenario


def test_what_is_missing_is_named() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (system, _):
            gateway = system.gateway
            assert [each.service for each in gateway.missing()] == ["tokenizer"]
            system.facts = None
            system.tell()
            await system.until(lambda: [each.service for each in gateway.missing()] == ["worker", "tokenizer"])
            with pytest.raises(Reject) as caught:
                gateway.facts()
            assert caught.value.reason is RejectReason.UNAVAILABLE
            system.facts = FACTS
            system.tokenizer()
            await system.until(lambda: not gateway.missing())
            assert gateway.facts() == FACTS
            gateway.node.view.views[0].heard_s = time.monotonic() - 6
            assert [each.service for each in gateway.missing()] == ["scheduler"]
            gateway.draining = True
            assert next(each.service for each in gateway.missing()) == "api"

    scenario(main)


def test_progress_of_a_start_is_told() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (system, _):
            stage = Progress("weights", 3, 10)
            worker = Member(Peer("worker", 0, 77, ""), "starting", 0, stage)
            view = system.gateway.node.view
            view.update(5, Members([worker], [], Load()), time.monotonic())
            assert system.gateway.missing()[0].reason == "no worker is ready (weights 3/10)"

    scenario(main)


def test_questions_are_answered_or_refused() -> None:
    async def main() -> None:
        async with running() as (system, _):
            gateway = system.gateway
            reply = await gateway.ask(Tokenize(0, PromptKind.TEXT, "ab"))
            assert isinstance(reply, Tokenized) and list(unpack_i32(reply.tokens)) == [97, 98]
            assert await gateway.ask(Detokenize(0, reply.tokens)) == Detokenized(reply.call_id + 1, "ab")
            system.remove(system.tokenizers[0])
            await system.until(lambda: not gateway.tokenizers())
            with pytest.raises(Reject):
                await gateway.ask(Detokenize(0, b""))

    scenario(main)


@pytest.mark.parametrize(
    ("frame", "counter"),
    [
        (b"garbage", "bad_frame"),
        (b"", "bad_frame"),
        (MAGIC + b"\x01\x00" + b"\x01" * 8 + b"\xc1\xc1", "bad_frame"),
        (MAGIC + b"\x09\x00" + b"\x01" * 8 + b"\x90", "bad_version"),
    ],
)
def test_frames_that_are_not_ours_are_counted_and_dropped(frame: bytes, counter: str) -> None:
    async def main() -> None:
        async with running() as (system, client):
            system.to_api(1)._socket.send(frame)
            await system.until(lambda: getattr(system.process.counters, counter) == 1)
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


def test_frames_of_a_departed_tokenizer_are_counted_and_dropped() -> None:
    async def main() -> None:
        async with running(tokenizers=2) as (system, client):
            gone = system.tokenizers[0]
            system.remove(gone)
            await system.until(lambda: len(system.gateway.tokenizers()) == 1)
            gone.send(Detokenized(1, ""))
            await system.until(lambda: system.process.counters.dead_sender == 1)
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200

    scenario(main)


def test_text_of_a_stranger_is_counted_and_dropped() -> None:
    async def main() -> None:
        async with running() as (system, client):
            tokenizer = system.tokenizers[0]
            tokenizer.on_submit = lambda submit: None
            asking = asyncio.ensure_future(client.post("/v1/completions", json=COMPLETION))
            await system.until(lambda: bool(tokenizer.submits))
            [submit] = tokenizer.submits
            system.to_api(0x5555).send(rows((submit.seq_id, 0, 1, "spoilt")))
            await system.until(lambda: system.gateway.figures.unknown_results == 1)
            tokenizer.answer(submit)
            assert "spoilt" not in (await asking).json()["choices"][0]["text"]

    scenario(main)


class Consumer:
    def __init__(self) -> None:
        self.comments = 0

    def update(self) -> None: ...

    def keep_alive(self) -> None:
        self.comments += 1


def test_silent_streams_get_comments() -> None:
    async def main() -> None:
        async with running() as (system, _):
            gateway: Any = system.gateway
            system.tokenizers[0].on_submit = lambda submit: None
            submits = submits_of(BODY.parse(b'{"prompt": "x"}'), FACTS, 8)
            request = gateway.open(submits, 100.0, 5)
            request.consumer = Consumer()
            for now_s in (110.0, 115.0, 120.0, 130.0):
                gateway.sweep(now_s)
            assert request.consumer.comments == 2
            gateway.end_all("over")
            assert request.failure is not None and not gateway.hub.choices

    scenario(main)


def test_schedulers_that_do_not_serve_are_named_and_one_is_enough() -> None:
    async def main() -> None:
        async with running("services.scheduler.replicas=3") as (system, client):
            gateway, view = system.gateway, system.gateway.node.view
            assert [each.service for each in gateway.impaired()] == ["scheduler-1", "scheduler-2"]
            now_s = time.monotonic()
            other = msgspec.structs.replace(FACTS, name="another")
            for instance, model in ((1, None), (2, other)):
                own = Member(Peer("scheduler", instance, 70 + instance, ""), "ready")
                view.update(70 + instance, Members([own], [], Load(), model), now_s)
            answer = await client.get("/health")
            assert answer.status_code == 200 and answer.json()["missing"] == ["scheduler-1", "scheduler-2"]
            assert "scheduler-1 has no worker" in answer.json()["reason"]
            assert "scheduler-2 serves another model" in answer.json()["reason"]
            assert gateway.facts() == FACTS

    scenario(main)


def test_the_clients_id_is_recorded_with_the_sequences_it_stands_for() -> None:
    async def main() -> None:
        async with running() as (system, client):
            body = {**COMPLETION, "prompt": ["hi", "ho"], "n": 2}
            answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
            assert answer.status_code == 200
            refused = await client.post("/v1/completions", json={**body, "n": 0}, headers={"x-request-id": "bad"})
            assert refused.status_code == 400
            rings = system.gateway.recorder.read()
            received = [event for event in rings["requests"] if event.kind is Kind.RECEIVED]
            ended = [event.seq for event in rings["requests"] if event.kind is Kind.ANSWERED]
            assert [(event.text, event.a) for event in received] == [("mine", 2), ("mine", 2)]
            assert sorted(ended) == sorted(event.seq + choice for event in received for choice in range(2))
            assert [(event.text, event.a) for event in rings["refusals"]] == [("bad", 400)]

    scenario(main)

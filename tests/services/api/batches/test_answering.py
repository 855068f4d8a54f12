"""One line answered inside the real API process: by its key's limits, behind everybody, later where that helps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import api_keys
from services.api.batches.answering import Answering
from services.api.batches.records import Line
from services.api.keys import Keyring
from services.api.route import discover
from tests.services.api.system import System, running, scenario

URL = "/v1/completions"


def line(owner: str = "", **fields: Any) -> Line:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2} | fields
    return Line("b", 1, "c", URL, owner, json.dumps(body).encode())


def answering(system: System, keys: str = "") -> Answering:
    return Answering(system.gateway, Keyring("", keys), {each.path: each for each in discover() if each.batched})


def test_answered_as_over_http_behind_all_others() -> None:
    async def main() -> None:
        async with running() as (system, client):
            good, result = await answering(system)(line(priority=-5))
            assert good and result is not None
            own = json.loads(result)["response"]["body"]
            other = (await client.post(URL, json=json.loads(line().body))).json()
            different = ("id", "created")
            assert {k: v for k, v in own.items() if k not in different} == {
                k: v for k, v in other.items() if k not in different
            }
            assert [submit.priority for submit in system.tokenizers[0].submits] == [api_keys.LATEST, 0]
            assert system.gateway.bodies.held == 0 and not system.gateway.hub.choices

    scenario(main)


@pytest.mark.parametrize(
    ("reason", "status"), [("invalid", 400), ("overloaded", None), ("unavailable", None), ("out_of_memory", 503)]
)
def test_refusals_that_pass_are_no_answer(reason: str, status: int | None) -> None:
    async def main() -> None:
        async with running() as (system, _):
            tokenizer = system.tokenizers[0]
            tokenizer.on_submit = lambda submit: tokenizer.refuse(submit, reason, "so it is")
            good, result = await answering(system)(line())
            assert not good and (result is None) == (status is None)
            if result is not None:
                assert json.loads(result)["response"]["status_code"] == status

    scenario(main)


def test_limits_and_the_end_of_a_key() -> None:
    async def main() -> None:
        async with running() as (system, _):
            answer = answering(system, "mine=" + "k" * 20)
            account = answer._keyring.named("mine")
            assert account is not None
            good, result = await answer(line("mine"))
            assert good and account.open == 0
            assert [submit.tenant for submit in system.tokenizers[0].submits] == ["mine"]
            account.key = api_keys.Key("mine", account.key.salt, account.key.hash, requests=1)
            account.open = 1
            assert (await answer(line("mine"))).result is None, "one is open already: later"
            good, result = await answer(line("gone"))
            assert not good and result is not None and json.loads(result)["response"]["status_code"] == 401

    scenario(main)


def test_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with running() as (system, _):
            answer = answering(system)
            assert not answer.welcome(), "two wait"
            system.load = system.load.__class__(running=3)
            await system.until(answer.welcome)
            own = system.process.incarnation
            await system.until(lambda: answer.alive() == [own])
            is_told: Callable[[], bool] = lambda: not answer.welcome()  # noqa: E731
            system.remove(system.tokenizers[0])
            await system.until(is_told)

    scenario(main)

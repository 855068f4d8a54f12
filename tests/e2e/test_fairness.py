"""Two keys under more load than the server has room for: each gets what its weight says, and nothing of the other's."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.steered import LIMIT_S, Steered
from valence.keys import add, change

WEIGHTS = {"light": 1, "heavy": 3}
ROWS, OUTPUT = 4, 12
MEASURED = 160  # answers at most, with some of each key still waiting


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    return file, {name: add(file, name, weight=weight) for name, weight in WEIGHTS.items()}


@pytest.fixture(scope="module")
def busy(keys: tuple[Path, dict[str, str]]) -> Iterator[Steered]:
    settings = ("worker.kind=null", "worker.step_us=2000", f"scheduler.max_rows={ROWS}", "services.api.replicas=2")
    with Steered(*settings, f"api.keys_file={keys[0]}") as system:
        yield system


def shares(system: Steered, secrets: dict[str, str], waiting: dict[str, int]) -> Counter[str]:
    """Answers that each key has got of so many requests, all asked before the first step, when the worker stands."""
    answered: Counter[str] = Counter()
    found: Counter[str] = Counter()
    total = sum(waiting.values())

    async def ask(client: httpx.AsyncClient, name: str, place: int) -> None:
        headers = {"authorization": f"Bearer {secrets[name]}"}
        body = {"prompt": f"{name} {place}", "max_tokens": OUTPUT, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        answered[name] += 1

    async def ask_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=system.url, timeout=LIMIT_S, limits=limits) as client:
            await asyncio.gather(
                *(ask(client, name, place) for name, count in waiting.items() for place in range(count))
            )

    def count() -> None:
        end_s = time.monotonic() + LIMIT_S
        while system.admitted() + answered.total() != total:  # what has ended is on its way
            assert time.monotonic() < end_s, answered
        found.update(answered)

    with system.struck([count], MEASURED * OUTPUT // ROWS, sequences=total):
        asyncio.run(ask_all())
    assert 0.8 * MEASURED < found.total() <= MEASURED and all(found[name] < waiting[name] for name in waiting)
    return found


def test_shares_are_as_the_weights_say(busy: Steered, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    got = shares(busy, secrets, {"light": 60, "heavy": 150})
    assert 0.8 < got["heavy"] / got["light"] / 3 < 1.2, got
    change(file, "heavy", weight=1)
    got = shares(busy, secrets, {"light": 105, "heavy": 105})
    assert 0.8 < got["heavy"] / got["light"] < 1.2, got


def test_a_prefix_is_found_by_its_tenant_on_any_replica_and_by_nobody_else(
    busy: Steered, keys: tuple[Path, dict[str, str]]
) -> None:
    body = {"prompt": [7] * 200, "max_tokens": 1}

    def cached(secret: str) -> int:
        with httpx.Client(base_url=busy.url, timeout=60) as client:  # a connection of its own, so replicas take turns
            headers = {"authorization": f"Bearer {secret}"}
            end_s = time.monotonic() + LIMIT_S
            while (answer := client.post("/v1/completions", json=body, headers=headers)).status_code == 503:
                assert time.monotonic() < end_s  # one replica may know later than the other that all is there
            assert answer.status_code == 200
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(keys[1]["light"]) == 0
    assert [cached(keys[1]["light"]) for _ in range(8)] == [192] * 8
    assert cached(keys[1]["heavy"]) == 0 and cached(keys[1]["heavy"]) == 192

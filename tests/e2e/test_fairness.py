"""Two keys under more load than the server has room for: each gets what its weight says, and nothing of the other's."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.system import System
from valence.keys import add, change

WEIGHTS = {"light": 1, "heavy": 3}
OPEN = 24  # requests of each key at once, for 4 rows: some always wait, however slow the clients are
OUTPUT = 12
WARM, MEASURED = 40, 200  # answers


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    return file, {name: add(file, name, weight=weight) for name, weight in WEIGHTS.items()}


@pytest.fixture(scope="module")
def busy(keys: tuple[Path, dict[str, str]]) -> Iterator[System]:
    settings = ("worker.kind=null", "worker.step_us=20000", "scheduler.max_rows=4", "services.api.replicas=2")
    with System(*settings, f"api.keys_file={keys[0]}") as system:
        yield system


class Load:
    """Clients of each key that begin together and ask again as soon as they are answered."""

    def __init__(self, url: str, secrets: dict[str, str]) -> None:
        self.answers: list[str] = []  # names, in the order of the answers
        self.statuses: Counter[int] = Counter()
        self._begin = threading.Barrier(OPEN * len(secrets))
        self._lock = threading.Lock()
        self._url, self._secrets = url, secrets

    def shares(self) -> Counter[str]:
        """Answers of each key, after the first ones, as long as all clients go on."""
        names = [name for name in self._secrets for _ in range(OPEN)]
        threads = [threading.Thread(target=self._ask, args=(name, place)) for place, name in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Counter(self.answers[WARM : WARM + MEASURED])

    def _ask(self, name: str, place: int) -> None:
        headers = {"authorization": f"Bearer {self._secrets[name]}"}
        body = {"prompt": f"{name} {place}", "max_tokens": OUTPUT, "ignore_eos": True}
        with httpx.Client(base_url=self._url, headers=headers, timeout=120) as client:
            self._begin.wait()  # a client takes long to make on a busy machine
            while len(self.answers) < WARM + MEASURED:
                status = client.post("/v1/completions", json=body).status_code
                with self._lock:
                    self.statuses[status] += 1
                    self.answers.append(name)


def test_shares_are_as_the_weights_say(busy: System, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    load = Load(busy.url, secrets)
    shares = load.shares()
    assert set(load.statuses) == {200}
    assert 0.8 < shares["heavy"] / shares["light"] / 3 < 1.2, shares
    change(file, "heavy", weight=1)
    shares = Load(busy.url, secrets).shares()
    assert 0.8 < shares["heavy"] / shares["light"] < 1.2, shares


def test_a_prefix_is_found_by_its_tenant_on_any_replica_and_by_nobody_else(
    busy: System, keys: tuple[Path, dict[str, str]]
) -> None:
    body = {"prompt": [7] * 200, "max_tokens": 1}

    def cached(secret: str) -> int:
        with httpx.Client(base_url=busy.url, timeout=60) as client:  # a connection of its own, so replicas take turns
            answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {secret}"})
            assert answer.status_code == 200
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(keys[1]["light"]) == 0
    assert [cached(keys[1]["light"]) for _ in range(8)] == [192] * 8
    assert cached(keys[1]["heavy"]) == 0 and cached(keys[1]["heavy"]) == 192

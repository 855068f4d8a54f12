"""Replicas: requests go through all of them, one may stop and come back, the number may change while serving."""

import concurrent.futures
import re
import time

import httpx

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S

BODY = {"model": "SmolLM2-135M-Instruct", "prompt": "hi", "max_tokens": 2}


def post(system: System) -> int:
    return httpx.post(f"{system.url}/v1/completions", json=BODY, timeout=60).status_code


def served(system: System) -> dict[tuple[str, str], float]:
    """Requests accepted by each replica so far."""
    text = httpx.get(f"{system.url}/metrics", timeout=60).text
    pattern = r'valence_requests_total\{[^}]*instance="(\d+)"[^}]*service="(\w+)"[^}]*\} ([\d.e+]+)'
    return {(service, instance): float(value) for instance, service, value in re.findall(pattern, text)}


def until_served(system: System, replicas: list[tuple[str, str]], before: dict[tuple[str, str], float]) -> None:
    """Sends requests, many at once, until each of the replicas has accepted one more."""
    end_s = time.monotonic() + LIMIT_S
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        while time.monotonic() < end_s:
            assert set(pool.map(lambda _: post(system), range(16))) == {200}
            now = served(system)
            if all(now.get(replica, 0) > before.get(replica, 0) for replica in replicas):
                return
    raise AssertionError(f"not all of {replicas} took part: {before} -> {served(system)}")


def test_all_replicas_take_part(system: System) -> None:
    until_served(system, [("api", "0"), ("api", "1"), ("tokenizer", "0"), ("tokenizer", "1")], served(system))


def test_a_replica_may_restart(system: System) -> None:
    for service in ("api", "tokenizer"):
        before = {(p["service"], p["instance"]): p["pid"] for p in system.status()["processes"]}
        system.valence("restart", service, "--instance", "1")
        after = {(p["service"], p["instance"]): p["pid"] for p in system.status()["processes"]}
        changed = {key for key in before if before[key] != after[key]}
        assert {(s, int(str(i))) for s, i in changed} == {(service, 1)}
        until_served(system, [(service, "0"), (service, "1")], served(system))


def test_the_number_may_change_while_serving(system: System) -> None:
    for number in (1, 3, 2):
        system.valence("scale", "tokenizer", str(number))
        processes = system.status()["processes"]
        assert sum(p["service"] == "tokenizer" and p["state"] == "ready" for p in processes) == number
        assert post(system) == 200

"""A deadline with the real system: the client is told, and the blocks of the request are free again."""

import time

import httpx
import openai
import pytest

from benchmarks.system import System
from tests.e2e.steered import LIMIT_S, Steered

MODEL = "SmolLM2-135M-Instruct"
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0}


def is_idle(system: System) -> bool:
    """Nothing runs or waits, and each block is free or cached."""
    state = system.status()
    kv, requests = state["kv"], state["requests"]
    return (
        not (requests["running"] or requests["waiting"])
        and kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"]
    )


def await_idle(system: System) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_idle(system):
        assert time.monotonic() < end_s, system.status()
        time.sleep(0.05)


def test_a_whole_answer_that_takes_too_long_is_a_504(system: System) -> None:
    long = {**LONG, "ignore_eos": True}
    for body, headers in (({**long, "deadline_ms": 500}, {}), (long, {"x-request-timeout-ms": "500"})):
        answer = httpx.post(f"{system.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    await_idle(system)


def test_openais_client_does_not_try_again(system: System) -> None:
    sent: list[httpx.Request] = []
    with (
        httpx.Client(event_hooks={"request": [sent.append]}, timeout=60) as http,
        openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=2, http_client=http) as client,
        pytest.raises(openai.APIStatusError) as failed,
    ):
        client.completions.create(**LONG, extra_body={"ignore_eos": True, "deadline_ms": 300})
    assert failed.value.status_code == 504 and len(sent) == 1
    await_idle(system)


def test_a_stream_that_takes_too_long_ends_with_an_error(system: Steered) -> None:
    """The worker stands still after some tokens, which are there long before the deadline on any machine."""
    body = {**LONG, "stream": True, "ignore_eos": True, "deadline_ms": 10_000}
    system.allow(5)
    with httpx.stream("POST", f"{system.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        blocks = [line for line in answer.iter_lines() if line.startswith("data: ")]
    system.allow(None)
    assert len(blocks) > 1 and '"code":"deadline_exceeded"' in blocks[-1]
    assert sum('"error":' in block for block in blocks) == 1
    await_idle(system)

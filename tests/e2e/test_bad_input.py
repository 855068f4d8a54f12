"""Whatever a client sends: the right status, OpenAI's error body, the field's name, and a service that goes on."""

import json
from typing import Any

import httpx
import pytest

from benchmarks.system import System

MODEL = "SmolLM2-135M-Instruct"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 1, "temperature": 0, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 1, "temperature": 0, **fields}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:300]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.fixture(autouse=True, scope="module")
def _unharmed(system: System):
    """After all of it the same processes are there, and they serve."""
    before = {(p["service"], p["instance"]): p["pid"] for p in system.status()["processes"]}
    yield
    assert {(p["service"], p["instance"]): p["pid"] for p in system.status()["processes"]} == before
    assert httpx.post(system.url + TEXT, json=text(), timeout=60).status_code == 200


FIELDS = [
    (CHAT, chat(temperature=-1), "temperature"),
    (CHAT, chat(temperature=1e300), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(top_k=-5), "top_k"),
    (CHAT, chat(deadline_ms=0), "deadline_ms"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_completion_tokens=10**30), "max_completion_tokens"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**6), "n"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(stop=[1]), "stop"),
    (CHAT, chat(stop={"a": 1}), "stop"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"99999999": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1000}), "logit_bias"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[10**9]), "stop_token_ids"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages=[{"role": "wizard\n", "content": "x"}]), "messages"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]),
        "messages",
    ),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(logprobs="all"), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=99), "top_logprobs"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),  # this model has no calls
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, {"model": MODEL}, "messages"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(prompt=[10**9]), "prompt"),
    (TEXT, text(prompt=[-1]), "prompt"),
    (TEXT, text(prompt=[1.5]), "prompt"),
    (TEXT, text(prompt=[[1], "a"]), "prompt"),
    (TEXT, text(prompt="word " * 9000), "prompt"),
    (TEXT, text(max_tokens=9000), "max_tokens"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(echo="x"), "echo"),
    (TEXT, text(best_of=2, n=3), "best_of"),
    (TEXT, text(use_beam_search=True, stream=True), "stream"),
    (TEXT, text(model=7), "model"),
]


@pytest.mark.parametrize(("path", "body", "field"), FIELDS, ids=[f"{f}-{i}" for i, (_, _, f) in enumerate(FIELDS)])
def test_a_bad_field_is_named(system: System, path: str, body: dict[str, Any], field: str) -> None:
    error = error_of(httpx.post(system.url + path, json=body, timeout=60), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0].partition(".")[0] == field


def test_an_overlong_prompt_names_the_limits(system: System) -> None:
    error = error_of(httpx.post(system.url + TEXT, json=text(prompt="word " * 9000), timeout=60), 400)
    assert "8192" in error["message"]
    assert "9001" in error["message"] or "9000" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"model": }',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b"\x00" * 10,
    ],
    ids=range(10),
)
def test_malformed_bodies(system: System, content: bytes) -> None:
    error_of(
        httpx.post(system.url + CHAT, content=content, headers={"content-type": "application/json"}, timeout=60), 400
    )


def test_non_finite_numbers(system: System) -> None:
    for word in ("NaN", "Infinity", "1e999"):
        body = json.dumps(chat()).replace('"temperature": 0', f'"temperature": {word}')
        error_of(httpx.post(system.url + CHAT, content=body.encode(), timeout=60), 400)


def test_a_lone_surrogate_is_no_text(system: System) -> None:
    body = b'{"model": "%s", "prompt": "\\ud800", "max_tokens": 1}' % MODEL.encode()
    error_of(httpx.post(system.url + TEXT, content=body, timeout=60), 400)


def test_unknown_model_route_and_method(system: System) -> None:
    error = error_of(httpx.post(system.url + CHAT, json=chat(model="gpt-5"), timeout=60), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(httpx.get(system.url + "/v2/nothing", timeout=60), 404)
    response = httpx.get(system.url + CHAT, timeout=60)
    error_of(response, 405)
    assert "POST" in response.headers["allow"]


def test_a_huge_body_is_not_read(system: System) -> None:
    error_of(httpx.post(system.url + CHAT, content=b"x" * 10_000_000, timeout=60), 413)

    def chunks():
        for _ in range(20):
            yield b"x" * 1_000_000

    error_of(httpx.post(system.url + CHAT, content=chunks(), timeout=60), 413)


def test_unknown_fields_are_accepted_and_logged_once(system: System) -> None:
    field = "frobnicate_level"
    for _ in range(6):
        assert httpx.post(system.url + CHAT, json=chat(**{field: 3}), timeout=60).status_code == 200
    logs = [log.read_text() for log in (system.run_dir / "log").glob("api-*.log")]
    assert all(log.count(field) <= 1 for log in logs)
    assert any(field in log for log in logs)

"""A secret in prompts and outputs, errors of all kinds, crashes: no file of the run directory has it."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.system import System
from common import log
from common.columns import pack_i32, pack_u64
from common.config import load
from common.protocol import (
    Abort,
    Admit,
    Hello,
    Member,
    Peer,
    RowStart,
    Sampling,
    StepPlan,
    StepResult,
    TokenBatch,
)
from common.transport import LinkCounters, Push
from services.api import route
from services.api.gateway import Gateway
from services.api.route import Endpoint
from tests.security import checkpoints
from tests.services.api.system import running, scenario
from valence.status import StatusClient

SECRET = "xyzzyplugh"
LIMIT_S = 240
TEMPLATE = """
{%- for m in messages -%}
{%- if "fault" in m.content -%}{{ m.missing.deeper }}{%- endif -%}
{%- if "refuse" in m.content -%}{{ raise_exception("not this: " ~ m.content) }}{%- endif -%}
{%- if "loop" in m.content -%}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- endif -%}
{{ m.content }}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model = checkpoints.make(tmp_path_factory.mktemp("prompts") / "model", TEMPLATE)
    settings = ("worker.kind=null", f"model.source={model}", "log.level=debug", "tokenizer.max_template_s=0.5")
    with System(*settings, "worker.step_us=1000") as system:
        yield system


def post(system: System, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(system.url + path, json=body, timeout=120, **more)


def chat(system: System, content: Any, **fields: Any) -> httpx.Response:
    return post(system, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})


def members(system: System) -> dict[str, Member]:
    with StatusClient(load(system.run_dir / "config.toml")) as client:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            if (status := client.ask()) is not None:
                return {member.peer.service: member for member in status.members}
    raise AssertionError("the scheduler did not answer")


def clean(system: System, *texts: str) -> None:
    """No file of the run, sockets apart, has the secret or one of the texts."""
    files = [path for path in system.run_dir.rglob("*") if path.is_file()]
    contents: dict[Path, str] = {}
    for path in [*files, Path(system._log)]:
        with contextlib.suppress(FileNotFoundError):  # a process removes its own at its end
            contents[path] = path.read_text(errors="replace")
    assert any(path.suffix == ".log" and content for path, content in contents.items())
    for path, content in contents.items():
        for text in (SECRET, SECRET.encode().hex(), *texts):
            assert text not in content, f"{text!r} is in {path}"


def test_ordinary_requests_and_refused_ones(system: System) -> None:
    answer = post(system, "/v1/completions", {"prompt": f"{SECRET} hello", "max_tokens": 24})
    output = answer.json()["choices"][0]["text"]
    assert len(output) > 24
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "temperature": SECRET},
        {"prompt": {SECRET: 1}},
        {"prompt": SECRET, "stop": [SECRET] * 99},
        {"prompt": SECRET, SECRET + " and more words": 1},
        {"prompt": SECRET, "logit_bias": {SECRET: 1}},
        {"prompt": SECRET * 9000},
        {"prompt": SECRET, "model": SECRET},
        {"prompt": SECRET, "response_format": {"type": SECRET}},
    ]
    for body in bodies:
        status = post(system, "/v1/completions", {"max_tokens": 2, **body}).status_code
        assert status in (200, 400, 404), body
    assert chat(system, SECRET, max_tokens=3).status_code == 200
    for content in (f"fault {SECRET}", f"refuse {SECRET}", f"loop {SECRET}", [{"type": SECRET}], {SECRET: 1}):
        assert chat(system, content).status_code == 400
    assert chat(system, "x", chat_template_kwargs={"messages": SECRET}).status_code == 400
    for content in (b'{"prompt": "' + SECRET.encode(), SECRET.encode(), b'{"prompt": "\xff' + SECRET.encode() + b'"}'):
        assert httpx.post(f"{system.url}/v1/completions", content=content, timeout=60).status_code == 400
    assert (
        httpx.get(f"{system.url}/{SECRET}?q={SECRET}", headers={"x-request-id": f"({SECRET})"}, timeout=60).status_code
        == 404
    )
    assert post(system, "/tokenize", {"prompt": SECRET}).status_code == 200
    clean(system, output[:24])


def send(target: Member, sender: int, *messages: Any) -> None:
    push = Push(target.peer.endpoint, sender, 100, LinkCounters())
    for message in messages:
        push.send(message)
    push.close(linger_ms=5000)


def crash(system: System, service: str, harm: Callable[[dict[str, Member]], None]) -> None:
    """Does harm while a request with the secret runs; the process ends and another one takes its place."""
    before = members(system)
    with httpx.stream(
        "POST",
        f"{system.url}/v1/completions",
        json={"prompt": f"{SECRET} in flight", "max_tokens": 4000, "stream": True},
        timeout=120,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        harm(before)
        pid = before[service].peer.pid
        end_s = time.monotonic() + LIMIT_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < end_s, system.output()
                time.sleep(0.05)
    while not system.ready():
        assert time.monotonic() < end_s + LIMIT_S
        time.sleep(0.05)
    clean(system)


def test_a_plan_that_breaks_the_worker(system: System) -> None:
    """A hostile peer speaks in the scheduler's name; the plan's columns have wrong sizes and carry the secret."""

    def harm(found: dict[str, Member]) -> None:
        row = RowStart(99_999, 1, pack_i32([ord(letter) for letter in SECRET]), 3, 0, b"", Sampling(4))
        plan = StepPlan(1, added=[row], slots=pack_i32([7, 99_999]), positions=pack_i32([1]), counts=pack_i32([1]))
        send(found["worker"], found["scheduler"].peer.incarnation, plan)

    crash(system, "worker", harm)
    text = (system.run_dir / "log" / "worker-0.log").read_text()
    assert "nobody caught this" in text and "IndexError" in text


def test_an_api_and_a_tokenizer_that_are_made_to_fail(system: System) -> None:
    def harm(found: dict[str, Member]) -> None:
        os.kill(found["tokenizer"].peer.pid, signal.SIGABRT)

    before = members(system)
    batch = TokenBatch(pack_u64([5]), pack_i32([0]), pack_i32([1, 2, 3]), [])
    send(before["tokenizer"], before["scheduler"].peer.incarnation, batch)
    send(before["scheduler"], before["tokenizer"].peer.incarnation, Admit(77, b"abc", Sampling(1)), Abort(77))
    send(before["scheduler"], before["worker"].peer.incarnation, StepResult(1 << 40, SECRET.encode()))
    crash(system, "tokenizer", harm)


def test_peers_that_lie_about_themselves(system: System) -> None:
    before = members(system)
    peer = Peer("api", 3, 12345, f"tcp://{SECRET}.example:99999")
    send(before["scheduler"], 12345, Hello(peer, SECRET))
    assert post(system, "/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
    clean(system)


def test_a_fault_in_the_api_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception whose text is the body, and one whose cause has it; in a handler, and in a callback of the loop."""

    async def broken(gateway: Gateway, request: Request) -> Response:
        body = (await request.body()).decode()
        try:
            {}[body]
        except KeyError as error:
            raise TypeError(f"cannot use {body}") from error
        raise AssertionError

    endpoints = [*route.discover(), Endpoint("POST", "/broken", broken, "Fails")]
    monkeypatch.setattr("services.api.app.discover", lambda: endpoints)
    root = logging.getLogger()
    kept, hooks = (root.handlers[:], root.level), (sys.excepthook, threading.excepthook, sys.unraisablehook)

    async def main() -> None:
        log.set_up("api-1", "debug", "text")
        async with running() as (_, client):
            answer = await client.post("/broken", content=SECRET)
            assert answer.status_code == 500 and SECRET not in answer.text

    try:
        scenario(main)
    finally:
        root.handlers[:], root.level = kept
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    logged = capsys.readouterr().err
    assert "TypeError (its text may quote a request" in logged and "KeyError" in logged
    assert SECRET not in logged

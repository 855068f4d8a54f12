"""What is left of requests and processes: stories of moved requests, reports of real faults, no user's text."""

import contextlib
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.system import System
from common.protocol import Load, Members, tokenizer_of
from common.recorder import Kind
from common.transport import LinkCounters, Push
from tests.e2e.steered import LIMIT_S, Steered
from valence import rundir
from valence.crashes import crashes, recordings
from valence.errors import CommandError
from valence.status import StatusClient
from valence.story import asked_scheduler, tell

MODEL = "SmolLM2-135M-Instruct"
MARKER, KEY = "zanzibar marzipan quokka", "sk-hunter2hunter2"
PROMPT = f"Tell me of the {MARKER} and of nothing else."
TOKENS, STEPS = 40, 12  # of a request, and before a kill


@pytest.fixture(scope="module")
def steady() -> Iterator[Steered]:
    """Steps of a fixed time, no model."""
    with Steered("worker.kind=null", "worker.step_us=20000", "services.tokenizer.replicas=2") as system:
        yield system


def until(found: Callable[[], Any]) -> Any:
    """What `found` gives, as soon as it gives something."""
    end_s = time.monotonic() + LIMIT_S
    while not (result := found()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.1)
    return result


def pid_of(system: System, name: str) -> int:
    """Of the process that lives and has become ready."""

    def found() -> int:
        for each in recordings(system.run_dir):
            ready = any(event.kind is Kind.STATE and event.text == "ready" for event in each.rings["life"])
            if each.name == name and ready and each.alive:
                return each.peer.pid
        return 0

    return int(until(found))


def ask(system: System, identity: str, max_tokens: int) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stop": [MARKER]}
    headers = {"x-request-id": identity, "authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", f"{system.url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=LIMIT_S
    ) as response:
        assert response.status_code == 200, response.read()
        return "".join(response.iter_text())


def lines_of(system: System, identity: str) -> list[str]:
    """Of its story; none if it has none yet."""
    try:
        told = tell(recordings(system.run_dir), identity)
    except CommandError:
        return []
    return [f"{entry.process.partition('-')[0]}: {entry.what}" for entry in told.entries]


def crash_of(system: System, name: str, pid: int) -> Callable[[], dict[str, Any] | None]:
    def found() -> dict[str, Any] | None:
        if not any(each.process == name and each.peer.pid == pid for each in crashes(system.run_dir)):
            return None  # cheaper than to ask by the command, which fails where there is none
        told: dict[str, Any] = json.loads(system.valence("story", "--crash", name, "--json"))
        return told if told["pid"] == pid and len(told["afterwards"]) == 2 else None

    return found


def in_order(lines: list[str], expected: list[str]) -> bool:
    """Whether lines that contain these texts come one after the other."""
    rest = iter(lines)
    return all(any(text in line for line in rest) for text in expected)


def test_the_story_of_a_request_that_survived_two_kills(steady: Steered) -> None:
    def kill_its_tokenizer() -> None:
        until(lambda: "api: first text" in lines_of(steady, "moved-1"))
        (first,) = tell(recordings(steady.run_dir), "moved-1").ids
        steady.kill("tokenizer", tokenizer_of(first))

    def taken_over(_: int) -> bool:
        return any("takes over" in line for line in lines_of(steady, "moved-1"))

    with steady.struck([kill_its_tokenizer, lambda: steady.kill("worker")], STEPS, again=taken_over):
        assert "[DONE]" in ask(steady, "moved-1", TOKENS)
    lines = lines_of(steady, "cmpl-moved-1")
    assert in_order(
        lines,
        [
            "api: received moved-1 as",
            "tokenizer: encoded: ",
            "scheduler: admitted with",
            "scheduler: row in step",
            "worker: row in slot",
            "api: first text",
            "api: the tokenizer has gone; waits for another",
            "api: moved to tokenizer-",
            "scheduler: worker lost",
            "worker: row in slot",
            "scheduler: ended: LENGTH",
            f"api: answered: length, {TOKENS} tokens",
        ],
    ), "\n".join(lines)
    assert any("worker: the last sign of pid" in line for line in lines)
    told = json.loads(steady.valence("story", "moved-1", "--json"))
    assert len(told["ids"]) == 2 and len(told["entries"]) == len(lines)
    remembered = asked_scheduler(steady.run_dir, told["ids"][0])
    assert [entry.what for entry in remembered if entry.process == "scheduler-0"][-1] == "LENGTH"
    shown = steady.valence("story", "moved-1")
    assert "request moved-1" in shown and f"answered: length, {TOKENS} tokens" in shown


@pytest.mark.parametrize("name", ["tokenizer-1", "worker-0", "scheduler-0", "api-0"])
def test_a_native_fault_of_each_service_leaves_its_stack(steady: Steered, name: str) -> None:
    pid = pid_of(steady, name)
    os.kill(pid, signal.SIGSEGV)
    told = until(crash_of(steady, name, pid))
    assert told["how"] == "Segmentation fault" and "(most recent call first)" in told["native"]
    assert told["events"] and "terminated by SIGSEGV" in told["afterwards"][0]
    assert "Segmentation fault" in steady.valence("story", "--crash", name)
    pid_of(steady, name)


@pytest.mark.parametrize("name", ["tokenizer-0", "worker-0", "api-0"])
def test_an_exception_leaves_its_stack(steady: Steered, name: str) -> None:
    """A scheduler that has given the process up, as it does with one that was silent."""
    pid = pid_of(steady, name)
    counters = LinkCounters()
    with StatusClient(rundir.running_config(steady.run_dir)) as client:
        status = until(client.ask)
    peers = {f"{m.peer.service}-{m.peer.instance}": m.peer for m in status.members}
    peer = peers[name]
    push = Push(peer.endpoint, peers["scheduler-0"].incarnation, 100, counters)
    others = [member for member in status.members if member.peer is not peer]
    assert push.send(Members(others, [peer.incarnation], Load(), status.model))
    push.close(linger_ms=2000)
    told = until(crash_of(steady, name, pid))
    assert told["how"].startswith("RuntimeError: ") and "has given this" in told["how"]
    assert told["raised"][0]["frames"][-1]["function"] in ("_apply", "_on_members")
    assert "exit status 1" in told["afterwards"][0]
    assert told["events"][-1]["what"] == "fault: RuntimeError"
    pid_of(steady, name)


def test_a_kill_is_told_by_what_the_process_noted_before(steady: Steered) -> None:
    pid = pid_of(steady, "tokenizer-0")
    os.kill(pid, signal.SIGKILL)
    told = until(crash_of(steady, "tokenizer-0", pid))
    assert told["how"].startswith("terminated by SIGKILL") and told["events"]
    pid_of(steady, "tokenizer-0")


def test_no_prompt_output_token_or_key_is_recorded(steady: Steered) -> None:
    """Last, when every service has recorded requests and has crashed with some open."""
    text = ask(steady, "marked-1", 12)
    said = [json.loads(line[6:])["choices"] for line in text.splitlines() if line.startswith("data: {")]
    output = "".join(choice["text"] for choices in said for choice in choices)
    too_long = {"model": MODEL, "prompt": f"{MARKER} " * 4000, "max_tokens": 4}
    assert httpx.post(f"{steady.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    wrong = {"model": MODEL, "prompt": MARKER, "max_tokens": MARKER}
    assert httpx.post(f"{steady.url}/v1/completions", json=wrong, timeout=60).status_code == 400
    victims = [pid_of(steady, name) for name in ("tokenizer-0", "tokenizer-1", "worker-0", "scheduler-0")]

    def abort_all() -> None:
        until(lambda: "api: first text" in lines_of(steady, "marked-2"))
        for pid in victims:
            os.kill(pid, signal.SIGABRT)

    with steady.struck([abort_all], STEPS):
        assert "[DONE]" in ask(steady, "marked-2", TOKENS)
    pid_of(steady, "tokenizer-0")
    tokens = httpx.post(f"{steady.url}/tokenize", json={"model": MODEL, "prompt": PROMPT}, timeout=60).json()["tokens"]
    content = b""
    for path in (path for folder in ("record", "crash") for path in (steady.run_dir / folder).iterdir()):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # a process removes its own at its end
            content += file.read()
            assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert b"marked-1" in content, "it is what was recorded of it"
    for word in (*MARKER.split(), KEY, output):
        assert len(word) > 5 and word.encode() not in content
    for width in "iq":
        for place in range(len(tokens) - 1):
            assert struct.pack(f"<2{width}", *tokens[place : place + 2]) not in content

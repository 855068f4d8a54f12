"""Bad frames on every link of a running system: counted, dropped, and nobody is harmed."""

import time
from collections.abc import Callable

import httpx
import pytest
import zmq

from benchmarks.system import System
from common.config import load
from common.protocol import PROTOCOL_VERSION, Member, Status
from common.transport import HEADER, MAGIC
from tests.e2e.steered import LIMIT_S
from valence.status import StatusClient

STALE = 0x1234567
ABORT = b"\x92\xa5Abort\x01"


def ask(system: System) -> Status:
    config = load(system.run_dir / "config.toml")
    with StatusClient(config) as client:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            if (status := client.ask()) is not None:
                return status
    raise AssertionError("the scheduler did not answer")


def send(endpoint: str, *frames: bytes) -> None:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(endpoint)
    for frame in frames:
        socket.send(frame)
    socket.close(linger=5000)


def until(system: System, found: Callable[[dict[str, Member]], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        members = {f"{m.peer.service}-{m.peer.instance}": m for m in ask(system).members}
        if found(members):
            return
    raise AssertionError("the counters did not show it")


@pytest.mark.parametrize("name", ["api-0", "api-1", "tokenizer-0", "tokenizer-1", "scheduler-0", "worker-0"])
def test_bad_frames_are_counted_and_dropped(system: System, name: str) -> None:
    before = {f"{m.peer.service}-{m.peer.instance}": m for m in ask(system).members}
    member = before[name]
    garbage = [b"", b"garbage", bytes(5000), HEADER.pack(MAGIC, PROTOCOL_VERSION, 5) + b"\xc1\xc1"]
    old = HEADER.pack(MAGIC, PROTOCOL_VERSION - 1, member.peer.incarnation) + ABORT
    send(member.peer.endpoint, *garbage, old)

    def counted(members: dict[str, Member]) -> bool:
        now, then = members[name].counters, member.counters
        return (
            now["link_bad_frame"] >= then["link_bad_frame"] + len(garbage)
            and now["link_bad_version"] >= then["link_bad_version"] + 1
        )

    until(system, counted)
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "hi", "max_tokens": 2}
    assert httpx.post(f"{system.url}/v1/completions", json=body, timeout=60).status_code == 200
    after = {f"{m.peer.service}-{m.peer.instance}": m.peer.pid for m in ask(system).members}
    assert after == {key: value.peer.pid for key, value in before.items()}


def test_frames_of_a_dead_incarnation_are_dropped_everywhere(system: System) -> None:
    """An API replica is restarted; frames that claim to come from its predecessor reach nobody."""
    dead = next(m.peer.incarnation for m in ask(system).members if (m.peer.service, m.peer.instance) == ("api", 1))
    system.valence("restart", "api", "--instance", "1")
    status = ask(system)
    before = {f"{m.peer.service}-{m.peer.instance}": m.counters["link_dead_sender"] for m in status.members}
    for member in status.members:
        send(member.peer.endpoint, HEADER.pack(MAGIC, PROTOCOL_VERSION, dead) + ABORT)

    def dropped(members: dict[str, Member]) -> bool:
        return all(members[name].counters["link_dead_sender"] >= count + 1 for name, count in before.items())

    until(system, dropped)

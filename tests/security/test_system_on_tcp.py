"""A whole system whose links are tcp with keys: it serves, recovers, and strangers on its ports harm nobody."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from benchmarks.system import System
from common.config import load
from common.protocol import PROTOCOL_VERSION, Status
from common.transport import HEADER, MAGIC, secure
from tests.ports import free_port
from tests.security.wire import GREETING, address, connect
from valence import link_keys
from valence.status import StatusClient


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    keys = tmp_path_factory.mktemp("links") / "keys"
    link_keys.init(keys, "here")
    settings = ("links.transport=tcp", f"links.scheduler_port={free_port()}", f"links.keys_dir={keys}")
    with System("worker.kind=null", "services.tokenizer.replicas=2", *settings) as system:
        yield system


def ask(system: System) -> Status:
    config = load(system.run_dir / "config.toml")
    try:
        with StatusClient(config) as client:
            end_s = time.monotonic() + 240
            while time.monotonic() < end_s:
                if (status := client.ask()) is not None:
                    return status
    finally:
        secure(load().links)
    raise AssertionError("the scheduler did not answer")


def served(system: System) -> bool:
    body = {"prompt": "hi", "max_tokens": 4}
    return httpx.post(f"{system.url}/v1/completions", json=body, timeout=120).status_code == 200


def test_it_serves_and_its_processes_come_back(system: System) -> None:
    assert served(system)
    for service in ("worker", "scheduler", "tokenizer", "api"):
        system.valence("restart", service)
        assert served(system)
    assert len(ask(system).members) == 5


def test_strangers_on_every_port(system: System) -> None:
    before = {member.peer.endpoint: member for member in ask(system).members}
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in before)
    for endpoint, member in before.items():
        frame = HEADER.pack(MAGIC, PROTOCOL_VERSION, member.peer.incarnation) + b"\x92\xa5Abort\x01"
        plain = zmq.Context.instance().socket(zmq.PUSH)
        plain.connect(endpoint)
        plain.send(frame, zmq.DONTWAIT)
        for content in (b"GET / HTTP/1.1\r\n\r\n", GREETING + b"\x06" + b"\xff" * 8, frame):
            for _ in range(20):
                with connect(endpoint) as sock, contextlib.suppress(OSError):
                    sock.sendall(content)
        assert served(system)
        plain.close(linger=0)
    after = {member.peer.endpoint: member for member in ask(system).members}
    assert {key: value.peer.pid for key, value in after.items()} == {key: v.peer.pid for key, v in before.items()}
    for member in after.values():
        counters = member.counters
        assert counters["link_bad_frame"] == counters["link_bad_version"] == counters["link_dead_sender"] == 0


def test_ports_are_of_this_host_only(system: System) -> None:
    """No process listens on an address that was not asked for."""
    for member in ask(system).members:
        _, port = address(member.peer.endpoint)
        with socket.socket() as probe:  # another loopback address is free
            probe.bind(("127.0.0.2", port))


def refused(*settings: str) -> str:
    command = [sys.executable, "-m", "valence", "serve", "--set", "worker.kind=null", "--port", "0"]
    options = [option for setting in settings for option in ("--set", setting)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 78, done.stdout + done.stderr
    return done.stderr


def test_a_server_that_would_be_open_does_not_start(tmp_path: Path) -> None:
    tcp, run_dir = "links.transport=tcp", f"links.run_dir={tmp_path}/run"
    assert "valence keys links init" in refused(tcp, run_dir, "links.host=0.0.0.0")
    assert "cannot read" in refused(tcp, run_dir, f"links.keys_dir={tmp_path}/nothing")
    link_keys.init(tmp_path / "keys", "here")
    (tmp_path / "keys" / "client.key").chmod(0o644)
    assert "others can read" in refused(tcp, run_dir, f"links.keys_dir={tmp_path}/keys")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "other users can write" in refused(f"links.run_dir={tmp_path}/open/run")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "symbolic link" in refused(f"links.run_dir={tmp_path}/link")

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config, load
from common.errors import ConfigError
from services.api.door import Door, Link, path_of
from tests.ports import free_port


def settings(run_dir: Path, port: int) -> Config:
    return load(None, [f"links.run_dir={run_dir}", f"api.port={port}"])


@contextlib.contextmanager
def opened(config: Config) -> Iterator[subprocess.Popen]:
    """A real door process."""
    command = [sys.executable, "-m", "services.api.door"]
    own = f"links.run_dir={config.run_dir} api.port={config.api.port}"
    process = subprocess.Popen(command, env=os.environ | {"VALENCE_SET": own}, stderr=subprocess.PIPE, text=True)
    try:
        assert "for whoever asks" in process.stderr.readline()
        yield process
    finally:
        process.terminate()
        process.communicate()


def accepted(sock: socket.socket) -> int:
    """How many connections wait at a listening socket."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.accept()[0].close()
            count += 1
    return count


def test_replicas_share_the_port_and_the_rest_get_what_one_leaves(tmp_path: Path) -> None:
    config = settings(tmp_path, free_port())
    with opened(config) as process:
        links = [Link(tmp_path) for _ in range(2)]
        for link in links:
            link.sock.listen(256)
        for _ in range(64):
            socket.create_connection(("127.0.0.1", config.api.port)).close()
        counts = [accepted(link.sock) for link in links]
        assert sum(counts) == 64 and all(counts), counts
        links[0].close()
        for _ in range(64):
            socket.create_connection(("127.0.0.1", config.api.port)).close()
        assert accepted(links[1].sock) == 64  # the door kept no copy of the closed one
        links[1].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", config.api.port))
    assert process.returncode == 0  # SIGTERM


def test_a_replica_that_leaves_at_once_does_not_end_the_door(tmp_path: Path) -> None:
    with opened(settings(tmp_path, free_port())) as process:
        process.send_signal(signal.SIGSTOP)
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
                hasty.connect(str(path_of(tmp_path)))
        process.send_signal(signal.SIGCONT)
        Link(tmp_path).close()
    assert process.returncode == 0


def test_a_replica_learns_that_the_door_has_gone(tmp_path: Path) -> None:
    with opened(settings(tmp_path, free_port())) as process:
        link = Link(tmp_path)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the door has gone"):
            asyncio.run(link.watch())
        link.close()


def test_a_replica_waits_for_the_door(tmp_path: Path) -> None:
    config = settings(tmp_path, free_port())
    path_of(tmp_path).touch()  # of a door that was killed: nobody listens
    found: list[Link] = []
    waiting = threading.Thread(target=lambda: found.append(Link(tmp_path)))
    waiting.start()
    with opened(config):
        waiting.join()
        assert found[0].sock.getsockname() == ("127.0.0.1", config.api.port)
        assert not found[0].sock.get_inheritable()
        found[0].close()


def test_without_a_door_it_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api\.door is set and no door answers at .*/door: No such file"):
        Link(tmp_path, wait_s=0.0)


def test_a_port_that_others_have_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(ConfigError, match=r"Address already in use; choose another api\.port"):
            Door(settings(tmp_path, stranger.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"api\.port is 0"):
        Door(settings(tmp_path, 0))


def test_an_api_process_serves_on_a_socket_of_the_door(tmp_path: Path) -> None:
    """And ends with an exit status that makes it start afresh when the door goes."""
    config = settings(tmp_path, free_port())
    own = ["--instance", "auto", "--set", f"links.run_dir={tmp_path}", "--set", f"api.port={config.api.port}"]
    with opened(config) as door:
        command = [sys.executable, "-m", "services.api", *own, "--set", "api.door=true"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as api:
            assert any("listening at" in line for line in api.stderr)
            with socket.create_connection(("127.0.0.1", config.api.port)) as client:
                client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert client.recv(64).startswith(b"HTTP/1.1 200")
            door.kill()
            assert "the door has gone" in api.stderr.read()
    assert api.returncode == 1

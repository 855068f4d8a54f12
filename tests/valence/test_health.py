import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common import lease
from common.config import load
from common.protocol import Load, Member, Peer, Status
from tests.valence.running import Server
from valence import health
from valence.errors import CommandError
from valence.health import api_address, api_trouble, end_if_hung, holders_here, hung_s, member_trouble
from valence.programs import Program

CONFIG = load(None, [])


def status(state: str, **counters: float) -> Status:
    return Status([Member(Peer("worker", 1, 5, "ipc://x"), state, counters=counters)], Load(), None)


def test_a_process_that_the_scheduler_calls_ready_is_healthy() -> None:
    program = Program("worker", 1)
    assert member_trouble(program, status("ready"), CONFIG) == ""
    assert member_trouble(program, status("starting"), CONFIG) == "it is starting"
    assert member_trouble(program, status("draining"), CONFIG) == "it is draining"
    assert member_trouble(program, status("failed"), CONFIG) == "it is failed"
    assert member_trouble(Program("worker", 0), status("ready"), CONFIG) == "the scheduler does not list it"
    assert member_trouble(program, None, CONFIG) == "no scheduler answers"


def test_one_that_stands_still_is_not() -> None:
    stuck = Member(Peer("tokenizer", 0, 5, ""), "ready", counters={"stalled_seconds": 61.0, "work_owed": 2.0})
    found = member_trouble(Program("tokenizer", 0), Status([stuck], Load(), None), CONFIG)
    assert found == "nothing done for 61 s, 2 waiting"


def test_each_api_replica_is_asked_at_its_own_address() -> None:
    shared = load(None, ["api.host=0.0.0.0", "api.port=8000"])
    assert api_address(1, shared) == ("127.0.0.1", 8000)
    own = load(None, ["api.host=0.0.0.0", "api.admin_port=8100"])
    assert [api_address(instance, own) for instance in (0, 1)] == [("127.0.0.1", 8100), ("127.0.0.1", 8101)]


@contextmanager
def answering(code: int, body: bytes) -> Iterator[tuple[str, int]]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/ready"
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield ("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        (200, b'{"status": "ready"}', ""),
        (503, b'{"status": "draining", "reason": "on its way out"}', "draining: on its way out"),
        (503, b"<html>", "/ready answers 503"),
        (502, b"[]", "/ready answers 502"),
    ],
)
def test_what_an_api_says_of_itself(code: int, body: bytes, words: str) -> None:
    with answering(code, body) as address:
        assert api_trouble(address) == words


def test_an_api_that_does_not_answer() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        assert "does not answer at 127.0.0.1" in api_trouble(taken.getsockname())


def test_the_processes_of_this_container(tmp_path: Path) -> None:
    config = load(None, [f"links.run_dir={tmp_path}"])
    with pytest.raises(CommandError, match=r"no process of .* runs in this container; name one"):
        holders_here(config)
    held = lease.take(tmp_path, "tokenizer")
    assert holders_here(config) == [("tokenizer", 0, os.getpid())]
    os.close(held.fd)


def test_a_hang_counts_from_the_first_look_that_found_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert hung_s(mark, 7, True, 100.0) == 0.0
    assert hung_s(mark, 7, True, 125.0) == 25.0
    assert hung_s(mark, 7, False, 126.0) == 0.0
    assert hung_s(mark, 7, True, 130.0) == 0.0
    assert hung_s(mark, 8, True, 170.0) == 0.0  # its successor
    assert hung_s(mark, 8, True, 5.0) == 0.0  # the machine was started since
    mark.write_text("rubbish")
    assert hung_s(mark, 8, True, 6.0) == 0.0
    assert hung_s(mark, 8, True, 7.0) == 1.0


class Answering:
    """A client of a scheduler that lists nobody."""

    def ask(self) -> Status:
        return Status([], Load(), None)


def test_what_has_hung_is_killed_and_what_has_not_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, [f"links.run_dir={tmp_path}"])
    with subprocess.Popen(["sleep", "1000"]) as process:
        holder = lease.Holder("worker", 0, process.pid)
        assert end_if_hung(holder, config, Answering()) == ""
        assert process.poll() is None
        monkeypatch.setattr(health, "HUNG_S", 0.0)
        done = end_if_hung(holder, config, Answering())
        assert done.startswith("it has hung for 0 s (the scheduler does not list it); killed")
    assert process.returncode == -signal.SIGKILL


def test_the_check_of_a_running_server(server: Server) -> None:
    for name in ("worker-0", "scheduler-0", "tokenizer-0"):
        answer = server.command("health", name)
        assert (answer.returncode, answer.stdout) == (0, f"{name} is ready\n")
    answer = server.command("health", "worker-7")
    assert (answer.returncode, answer.stderr) == (1, "valence: worker-7: the scheduler does not list it\n")


def test_a_process_that_numbered_itself_is_found_and_judged(tmp_path: Path) -> None:
    """As in a container. Alone it is not ready, and lives."""
    own = ["--set", f"links.run_dir={tmp_path}", "--set", "links.heartbeat_s=0.1"]
    command = [sys.executable, "-m", "services.api", "--instance", "auto", *own, "--set", "api.port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = next(line for line in process.stderr if "listening" in line)
        asked = [*own, "--set", f"api.port={int(line.rstrip().rpartition(':')[2])}", "--end-hung"]
        command = [sys.executable, "-m", "valence", "health", *asked]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        process.terminate()
        process.communicate()
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("valence: api-0: unavailable: ")
    assert process.returncode == 0

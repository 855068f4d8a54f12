"""A running server for the tests: real supervisor, scheduler and null worker, stand-ins for API and tokenizer."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

STANDIN = str(Path(__file__).with_name("standin.py"))
# Who gets no processor for some seconds is not dead.
FAST = ["worker.kind=null", "kv.blocks=64", "links.heartbeat_s=0.1", "links.dead_after_s=30"]


def still_running(run_dir: Path) -> list[list[str]]:
    """Command lines of all processes that name this run directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(run_dir) in word for word in command):
            found.append(command)
    return found


class Server:
    """`valence serve` in a process group of its own. Its output is read line by line."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, STANDIN, "valence", "serve", "--port", "0", "--set", f"links.run_dir={run_dir}"]
        self.process = subprocess.Popen(
            [*command, *(word for setting in FAST for word in ("--set", setting)), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        """The next line with that text. Fails when the output ends before."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"no line with {text!r} in:\n" + "\n".join(self.lines))

    def finish(self) -> int:
        """Reads to the end. Returns the exit status."""
        assert self.process.stdout
        with self.process.stdout as output:
            self.lines += output.read().splitlines()
        return self.process.wait()

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Another command of `valence`, on this server."""
        command = [sys.executable, STANDIN, "valence", *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    def status(self) -> dict[str, Any]:
        """As JSON, once a scheduler answers: one that gets no processor may not in time, and then nothing is known."""
        while True:
            answer = self.command("status", "--json")
            assert answer.returncode == 0, answer.stderr
            found: dict[str, Any] = json.loads(answer.stdout)
            if found["schedulers"]:
                return found


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    """A server that is gone afterwards, however the test ended."""
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        server = Server(Path(folder) / "run", *options)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
            if server.process.stdout and not server.process.stdout.closed:
                server.finish()

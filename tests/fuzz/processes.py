"""One of each service as real processes without a supervisor, so that a death is seen.

The worker is the null one: its tokens mean nothing, but each stream's number of tokens and its end are known.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.config import Config, load
from common.protocol import Member, Status
from tests.ports import free_port
from valence.status import StatusClient

SERVICES = ("scheduler", "worker", "tokenizer", "api")
LIMIT_S = 300.0  # others may use the processor


class Processes:
    """`command` starts one service's process; the arguments of the service are appended."""

    def __init__(self, *settings: str, command: tuple[str, ...] = (sys.executable, "-m")) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vf-")
        self.run_dir = Path(self._folder.name) / "run"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        own = (f"api.port={port}", f"links.run_dir={self.run_dir}", "worker.kind=null", "links.heartbeat_s=0.2")
        own += ("links.dead_after_s=20",)  # who gets no processor for some seconds is not dead
        self.settings = [*own, "kv.blocks=256", "scheduler.max_rows=16", *settings]
        self.config: Config = load(None, self.settings)
        options = [option for setting in self.settings for option in ("--set", setting)]
        self._logs = {name: Path(self._folder.name) / f"{name}.log" for name in SERVICES}
        self.processes = {}
        for name in SERVICES:
            with self._logs[name].open("w") as log:
                arguments = [*command, f"services.{name}", *options]
                self.processes[name] = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("the system did not get ready")

    def check(self) -> None:
        """Raises AssertionError, with its last words, if a process has ended."""
        for name, process in self.processes.items():
            code = process.poll()
            assert code is None, f"{name} ended with {code}:\n{self._logs[name].read_text(errors='replace')[-3000:]}"

    def status(self) -> Status:
        with StatusClient(self.config) as client:
            end_s = time.monotonic() + LIMIT_S
            while time.monotonic() < end_s:
                self.check()
                if (status := client.ask()) is not None:
                    return status
        raise AssertionError("the scheduler did not answer")

    def members(self) -> dict[str, Member]:
        """The real ones by service."""
        pids = {process.pid for process in self.processes.values()}
        return {member.peer.service: member for member in self.status().members if member.peer.pid in pids}

    def wait_idle(self) -> Status:
        """Until nothing is open anywhere; raises AssertionError if something stays."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            status = self.status()
            load = status.load
            pids = {process.pid for process in self.processes.values()}
            open_now = {
                member.peer.service: member.counters.get("open_requests", 0)
                for member in status.members
                if member.peer.pid in pids
            }
            unused = load.blocks_free + load.blocks_cached
            if not any(open_now.values()) and not load.running and not load.waiting and unused == load.blocks_total:
                return status
            assert time.monotonic() < end_s, f"left open: {open_now} {load}"
            time.sleep(0.05)

    def resident(self) -> dict[str, int]:
        """Bytes of memory of each process."""
        return {name: psutil.Process(process.pid).memory_info().rss for name, process in self.processes.items()}

    def complete(self, client: httpx.Client, tokens: int, **fields: Any) -> None:
        """One whole completion, which must have exactly these tokens."""
        body = {"prompt": "The sea is", "max_tokens": tokens, "ignore_eos": True, **fields}
        response = client.post(f"{self.url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found = response.json()
        assert found["usage"]["completion_tokens"] == tokens and found["choices"][0]["finish_reason"] == "length", found

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def running(*settings: str) -> Iterator[Processes]:
    processes = Processes(*settings)
    try:
        processes.wait_ready()
        yield processes
    finally:
        processes.end()

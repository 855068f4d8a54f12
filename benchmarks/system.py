"""Starts a whole system the way a person does (`valence serve`), for benchmarks and end-to-end tests.

Each system has its own port and run directory, so several can run side by side; `end` interrupts it like Ctrl-C.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from valence import rundir
from valence.display import tail
from valence.serve import free_port
from valence.status import StatusClient, document
from valence.supervisor import Supervisor

START_S = 240.0
LOOKS = 16  # each is a connection of its own, hence mostly another replica of the API: one may hear of all later


class System:
    """`with System("worker.kind=null") as system:` serves at `system.url` until the block ends."""

    def __init__(self, *settings: str, start_s: float = START_S) -> None:
        self._start_s = start_s
        self.port = free_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="valence-")
        self.run_dir = Path(self._folder.name) / "run"
        self.ready_s = 0.0
        own = (f"api.port={self.port}", f"links.run_dir={self.run_dir}", f"api.storage_dir={self._folder.name}/storage")
        options = [option for setting in (*own, *settings) for option in ("--set", setting)]
        self._log = Path(self._folder.name) / "serve.log"
        self._command = [sys.executable, "-m", "valence", "serve", *options]

    def __enter__(self) -> "System":
        start_s = time.monotonic()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not all(self.ready() for _ in range(LOOKS)):
                if self.process.poll() is not None or time.monotonic() - start_s > self._start_s:
                    raise RuntimeError(f"the system did not get ready:\n{self.output()}")
                time.sleep(0.05)
            self.ready_s = time.monotonic() - start_s
        finally:
            if not self.ready_s:
                self.end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def output(self) -> str:
        """What `valence serve` has printed, and the end of each service's log."""
        parts = [self._log.read_text(errors="replace")]
        for log in sorted((self.run_dir / "log").glob("*.log")):
            parts += [f"--- {log.name}", *tail(log, 20)]
        return "\n".join(parts)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def valence(self, *arguments: str) -> str:
        """Runs the command line against this system and returns what it prints."""
        command = [sys.executable, "-m", "valence", *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def status(self) -> dict[str, Any]:
        """What `valence status --json` prints, once a scheduler answers: without one all figures are zero.

        Asked from here: a command takes half a second of processor.
        """
        config = rundir.running_config(self.run_dir)
        end_s = time.monotonic() + START_S
        with StatusClient(config) as client:
            while not (answers := client.ask_each()) and time.monotonic() < end_s:
                pass
        return document(Supervisor(self.run_dir).processes(), answers, config.links, time.time())

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The processes of each service."""
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for entry in self.status()["processes"]:
            found[entry["service"]].append(psutil.Process(entry["pid"]))
        return found

    def process_of(self, service: str, instance: int = 0) -> psutil.Process:
        """The one that runs now, or its successor where it has just died. Looks at /proc only, hence at once."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, ValueError):  # it has just ended, or is none of a service
                    command = process.cmdline()
                    number = command[command.index("--instance") + 1]
                    if number == str(instance) and not {service, f"services.{service}"}.isdisjoint(command):
                        return process
            time.sleep(0.02)
        raise RuntimeError(f"no {service}-{instance} runs:\n{self.output()}")

    def kill(self, service: str, instance: int = 0) -> None:
        """kill -9."""
        self.process_of(service, instance).kill()

    def end(self) -> int:
        """Ctrl-C; returns the exit status of `valence serve`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(START_S)
        finally:
            self._folder.cleanup()
        return status


def cpu_seconds(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Processor time of each service so far, user and system."""
    return {name: sum(sum(p.cpu_times()[:2]) for p in members) for name, members in processes.items()}

"""The supervisor of one run: starting supervisord, asking and telling it over XML-RPC, and reading its log for events.

supervisord owns the service processes; this file owns nothing but a connection per call.
"""

import http.client
import os
import re
import socket
import subprocess
import sys
import xmlrpc.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.env import child_environment
from valence.errors import CommandError
from valence.programs import Program

CALL_S = 10.0
BAD_NAME, ALREADY_STARTED, NOT_RUNNING = 10, 60, 70  # supervisor.xmlrpc.Faults


class SupervisorGone(CommandError):
    """There is no supervisor in this run directory (any more)."""


class ProcessView(NamedTuple):
    """A service process as the supervisor sees it."""

    program: Program
    pid: int  # 0: not running
    state: str  # supervisor's word in lower case: starting, running, backoff, stopping, stopped, exited, fatal
    since_s: float  # Unix time of the last start, or of the end of a process that is down
    exit_status: int


class Event(NamedTuple):
    """Something that happened to a service process."""

    program: Program
    kind: str  # spawned, exited, stopped
    detail: str = ""
    pid: int = 0
    exit_status: int | None = None  # None: by a signal, or unknown


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=CALL_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = _Connection(self._path)
        self._connection = host, connection  # where Transport looks for what it has to close
        return connection


class Supervisor:
    """Calls into the supervisord of a run directory. Each call also wakes it, so it acts at once."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.socket = run_dir / "supervisor.sock"

    def call(self, method: str, *arguments: Any) -> Any:
        """`supervisor.METHOD`. Raises SupervisorGone, or xmlrpc.client.Fault when it refuses."""
        try:
            with xmlrpc.client.ServerProxy("http://localhost", transport=_Transport(self.socket)) as proxy:
                return getattr(proxy.supervisor, method)(*arguments)
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise SupervisorGone(f"no supervisor answers at {self.socket}: {error}") from error

    def alive(self) -> bool:
        """Whether something listens at the socket."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(CALL_S)
                probe.connect(str(self.socket))
        except OSError:
            return False
        return True

    def wake(self) -> None:
        """Makes it look at its processes now instead of within a second. Fine if it is ending or gone."""
        try:
            self.call("getState")
        except (SupervisorGone, xmlrpc.client.Fault):
            return

    def processes(self) -> list[ProcessView]:
        """All service processes, in the order of the list of programs."""
        views = []
        for found in self.call("getAllProcessInfo"):
            down = found["pid"] == 0
            since_s = found["stop"] if down else found["start"]
            state = str(found["statename"]).lower()
            program = Program.parse(found["name"])
            views.append(ProcessView(program, found["pid"], state, float(since_s), found["exitstatus"]))
        return sorted(views, key=lambda view: view.program)

    def find(self, program: Program) -> ProcessView | None:
        return next((view for view in self.processes() if view.program == program), None)

    def stop(self, program: Program) -> None:
        """Asks for an end and does not wait for it. Fine if it is down."""
        self._unless(NOT_RUNNING, "stopProcess", program.name, False)

    def start(self, program: Program) -> None:
        """Starts it and does not wait. Fine if it is up."""
        self._unless(ALREADY_STARTED, "startProcess", program.name, False)

    def _unless(self, fault: int, method: str, *arguments: Any) -> None:
        try:
            self.call(method, *arguments)
        except xmlrpc.client.Fault as refusal:
            if refusal.faultCode != fault:
                raise

    def add(self, program: Program) -> None:
        """Takes up and starts a program that is new in the configuration file."""
        self.call("reloadConfig")
        self.call("addProcessGroup", program.name)

    def remove(self, program: Program) -> None:
        """Forgets a stopped program."""
        self._unless(BAD_NAME, "removeProcessGroup", program.name)


def start(run_dir: Path, config_text: str, lock_fd: int) -> "subprocess.Popen[bytes]":
    """Starts supervisord, which starts all services at once. It ends them and itself on SIGTERM or when we die.

    It holds `lock_fd` open, so that the run directory counts as taken as long as either of us lives.
    """
    (run_dir / "log").mkdir(exist_ok=True)
    config_file = run_dir / "supervisord.conf"
    config_file.write_text(config_text)
    command = [sys.executable, "-P", "-m", "valence.launch", "SIGTERM", str(os.getpid()), "supervisor.supervisord"]
    with open(run_dir / "log" / "supervisord.out", "wb") as output:
        return subprocess.Popen(
            [*command, "-n", "-c", str(config_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(0),
            pass_fds=[lock_fd],
            start_new_session=True,  # Ctrl-C reaches us only; we decide the order of the end
        )


_LINE = re.compile(
    r"(?P<kind>spawned|exited|stopped): '?(?P<name>[a-z]+-\d+)'? (?:with pid (?P<pid>\d+)|\((?P<how>.*)\))"
)


class EventLog:
    """Events in the order in which they happened, read from supervisord's log file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "log" / "supervisord.log"
        self._offset = 0
        self._rest = ""

    def new(self) -> Iterator[Event]:
        """Events since the call before."""
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                file.seek(self._offset)
                text = self._rest + file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return
        *lines, self._rest = text.split("\n")
        for line in lines:
            if event := parse_event(line):
                yield event


def parse_event(line: str) -> Event | None:
    """`... exited: api-0 (exit status 78; not expected)` and its like; None for other lines."""
    match = _LINE.search(line)
    if not match:
        return None
    program = Program.parse(match["name"])
    if match["pid"]:
        return Event(program, "spawned", pid=int(match["pid"]))
    detail = match["how"].split(";")[0]
    status = re.fullmatch(r"exit status (\d+)", detail)
    return Event(program, match["kind"], detail, exit_status=int(status[1]) if status else None)

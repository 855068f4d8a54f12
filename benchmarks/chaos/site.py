"""The processes of a running system, as somebody who wants to hit them sees them: pids, readiness, connections.

Looks only: at /proc, and at the scheduler's own word. It asks the supervisor nothing, since every question wakes it
and so would make each recovery look faster than it is.
"""

import signal
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

import psutil

from benchmarks.system import System
from common.config import keys
from common.protocol import Status
from valence import rundir
from valence.programs import SERVICES, Program
from valence.status import StatusClient

ANSWER_S = 0.3


class Topology(NamedTuple):
    """Processes per service."""

    api: int = 2
    tokenizer: int = 2
    scheduler: int = 1
    worker: int = 1

    def settings(self) -> list[str]:
        """As `--set` takes them. A service that this version runs only one process of has no setting."""
        wanted = {f"services.{service}.replicas": count for service, count in self._asdict().items()}
        known = keys()
        return [f"{key}={count}" for key, count in wanted.items() if key in known]

    def programs(self) -> list[Program]:
        """Those that will run: a service without a setting has one process."""
        known = keys()
        counts = {s: count if f"services.{s}.replicas" in known else 1 for s, count in self._asdict().items()}
        return [Program(service, instance) for service in SERVICES for instance in range(counts[service])]


class Site:
    """One running system; use as a context manager, from one thread at a time."""

    def __init__(self, system: System, topology: Topology) -> None:
        self.system = system
        self.programs = topology.programs()
        self.killed: dict[int, Program] = {}  # by pid
        self._root = psutil.Process(system.process.pid)
        self._client = StatusClient(rundir.running_config(system.run_dir))
        self._apis: list[psutil.Process] = []

    def __enter__(self) -> "Site":
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, value, trace)

    def processes(self) -> dict[Program, psutil.Process]:
        """What runs now. A process that has just died is missing, or still there: ask `alive`."""
        found = {}
        for process in self._root.children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            service = next((word.removeprefix("services.") for word in command if word.startswith("services.")), "")
            if service in SERVICES and "--instance" in command:
                found[Program(service, int(command[command.index("--instance") + 1]))] = process
        return found

    def owner(self, port: int) -> int:
        """Pid of the API process that has accepted the connection from this local port; 0: none (yet)."""
        for _ in range(2):
            for process in self._apis:
                try:
                    connections = process.net_connections("tcp")
                except psutil.Error:
                    continue
                if any(c.raddr and c.raddr.port == port for c in connections):
                    return int(process.pid)
            self._apis = [process for program, process in self.processes().items() if program.service == "api"]
        return 0

    def kill(self, victims: tuple[Program, ...]) -> list[int]:
        """kill -9 of all of them at once; returns the pids. One that is down already is left out."""
        running = self.processes()
        found = [(victim, running[victim]) for victim in victims if victim in running]
        for victim, process in found:
            self.killed[process.pid] = victim
            process.send_signal(signal.SIGKILL)
        return [process.pid for _, process in found]

    def status(self) -> Status | None:
        return self._client.ask(ANSWER_S)

    def ready(self) -> bool:
        """Every process is there, alive, and ready by the scheduler's word; none of them is one that was killed."""
        status = self.status()
        if status is None or status.model is None:
            return False
        listed = {Program(m.peer.service, m.peer.instance): m for m in status.members if m.state == "ready"}
        return all(
            program in listed
            and listed[program].peer.pid not in self.killed
            and psutil.pid_exists(listed[program].peer.pid)
            for program in self.programs
        )


def counted(programs: list[Program]) -> Mapping[str, int]:
    """Processes per service."""
    return Counter(program.service for program in programs)

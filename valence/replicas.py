"""Changes to a running system: restart, scale, stop. Each step waits until the system shows that it is done.

The supervisor does the work; who is ready is asked of the scheduler. Raises `Impossible` with what a person can do.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from common.config import Config
from common.lifecycle import EXIT_CONFIG
from common.protocol import Status
from valence import programs, rundir
from valence.errors import CommandError
from valence.programs import SCALABLE, SERVICES, Program
from valence.status import StatusClient
from valence.supervisor import ProcessView, Supervisor

READY_WITHIN_S = 600.0  # a large model takes minutes to load
LOOK_S = 0.1
MOST_REPLICAS = 64

Tell = Callable[[str, str], None]  # program name, what it does now


class Impossible(CommandError):
    """What was asked for cannot be done, or did not come to be."""


def select(views: list[ProcessView], service: str, instance: int | None) -> list[Program]:
    """The programs that a command names, in the order in which they are replaced: from the edge inwards."""
    if service not in (*SERVICES, "all"):
        raise Impossible(f"no service {service!r}; there are {', '.join(SERVICES)}, and all")
    order = {name: rank for rank, name in enumerate(reversed(SERVICES))}
    found = [
        view.program
        for view in views
        if service in (view.program.service, "all") and instance in (None, view.program.instance)
    ]
    if not found:
        raise Impossible(f"no {service} with instance {instance}")
    return sorted(found, key=lambda program: (order[program.service], program.instance))


class Change:
    """One command's connection to a running system. Use within `StatusClient`'s context."""

    def __init__(self, config: Config, client: StatusClient, tell: Tell) -> None:
        self._config = config
        self._client = client
        self._tell = tell
        self._supervisor = Supervisor(config.run_dir)

    def restart(self, service: str, instance: int | None) -> Iterator[Program]:
        """Replaces the processes one after the other; yields each when its successor is ready."""
        for program in select(self._supervisor.processes(), service, instance):
            old_pid = self._stop(program)
            self._supervisor.start(program)
            self._wait_ready(program, old_pid)
            yield program

    def scale(self, service: str, count: int) -> Iterator[Program]:
        """Adds replicas, or takes the highest ones away; yields each when it is ready or gone."""
        if service not in SCALABLE:
            raise Impossible(f"{service} cannot be scaled yet: there is one; {' and '.join(SCALABLE)} can")
        if not 1 <= count <= MOST_REPLICAS:
            raise Impossible(f"{service} runs in 1 to {MOST_REPLICAS} replicas")
        present = [view.program for view in self._supervisor.processes()]
        replicas = {name: sum(program.service == name for program in present) for name in SERVICES}
        for instance in range(replicas[service], count):
            program = Program(service, instance)
            self._write({**replicas, service: instance + 1})
            self._supervisor.add(program)
            self._wait_ready(program, old_pid=0)
            yield program
        for instance in range(replicas[service] - 1, count - 1, -1):
            program = Program(service, instance)
            self._stop(program)
            self._write({**replicas, service: instance})
            self._supervisor.remove(program)
            yield program

    def _write(self, replicas: dict[str, int]) -> None:
        run_dir = self._config.run_dir
        (run_dir / "supervisord.conf").write_text(programs.render(self._config, run_dir, replicas))

    def _stop(self, program: Program) -> int:
        """Ends a process, letting it drain. Returns the pid that it had."""
        view = self._supervisor.find(program)
        self._tell(program.name, "draining")
        self._supervisor.stop(program)
        while (now := self._supervisor.find(program)) and now.pid:
            time.sleep(LOOK_S)
        return view.pid if view else 0

    def _wait_ready(self, program: Program, old_pid: int) -> None:
        self._tell(program.name, "starting")
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            view = self._supervisor.find(program)
            if view and view.state == "exited" and view.exit_status == EXIT_CONFIG:
                break
            status = self._client.ask(wait_s=1.0)
            if view and view.pid not in (0, old_pid) and status and ready_as(status, program, view.pid):
                return
            time.sleep(LOOK_S)
        log = self._config.run_dir / "log" / f"{program.name}.log"
        raise Impossible(f"{program.name} did not get ready; its log is {log}")


def ready_as(status: Status, program: Program, pid: int) -> bool:
    """Whether the scheduler lists this very process as ready."""
    return any(
        (member.peer.service, member.peer.instance, member.peer.pid, member.state) == (*program, pid, "ready")
        for member in status.members
    )


def stop(run_dir: Path) -> None:
    """Ends a whole run and waits until nothing of it is left."""
    supervisor = Supervisor(run_dir)
    owner = rundir.owner_pid(run_dir)
    if owner and psutil.pid_exists(owner):
        os.kill(owner, signal.SIGTERM)
    else:
        supervisor.call("shutdown")  # its foreground process was killed
    while supervisor.alive() or (owner and rundir.owner_pid(run_dir) == owner and psutil.pid_exists(owner)):
        time.sleep(LOOK_S)

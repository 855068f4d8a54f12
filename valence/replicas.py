"""Changes to a running system: restart, scale, stop. Each step waits until the system shows that it is done.

The supervisor does the work; who is ready is asked of the schedulers. Raises `Impossible` with what a person can do.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil

from common import config as configuration
from common.config import Config
from common.errors import EXIT_CONFIG
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
            serves = program.service == "scheduler" and self._serves(program.instance)
            old_pid = self._stop(program)
            self._supervisor.start(program)
            self._wait_ready(program, old_pid)
            if serves:  # the next scheduler's requests may have to go to this one
                self._wait(program, partial(self._serves, program.instance))
            yield program

    def _serves(self, scheduler: int) -> bool:
        """Whether that scheduler has a worker."""
        status = self._client.ask_each(wait_s=1.0).get(scheduler)
        return status is not None and status.model is not None

    def scale(self, service: str, count: int) -> Iterator[Program]:
        """Adds replicas, or takes the highest ones away; yields each when it is ready or gone."""
        if service not in SCALABLE:
            raise Impossible(f"no service {service!r} can be scaled; {', '.join(SCALABLE)} can")
        if not 1 <= count <= MOST_REPLICAS:
            raise Impossible(f"{service} runs in 1 to {MOST_REPLICAS} replicas")
        present = [view.program for view in self._supervisor.processes()]
        replicas = {name: sum(program.service == name for program in present) for name in SERVICES}
        for instance in range(replicas[service], count):
            program = Program(service, instance)
            self._write({**replicas, service: instance + 1})
            self._supervisor.add(program)
            if service == "scheduler":
                self._client.follow(instance + 1)
            self._wait_ready(program, old_pid=0)
            if service == "scheduler":
                self._set_schedulers(instance + 1)
            yield program
        for instance in range(replicas[service] - 1, count - 1, -1):
            program = Program(service, instance)
            if service == "scheduler":
                self._set_schedulers(instance)  # its workers and requests go to the others
            self._stop(program)
            self._write({**replicas, service: instance})
            self._supervisor.remove(program)
            yield program

    def _write(self, replicas: dict[str, int]) -> None:
        """For the supervisor, and how many schedulers there are for every process that starts from now on."""
        config, run_dir = self._config, self._config.run_dir
        scheduler = msgspec.structs.replace(config.services.scheduler, replicas=replicas["scheduler"])
        services = msgspec.structs.replace(config.services, scheduler=scheduler)
        new = run_dir / "config.toml.new"
        new.write_text(configuration.render(msgspec.structs.replace(config, services=services)))
        new.replace(run_dir / "config.toml")
        (run_dir / "supervisord.conf").write_text(programs.render(config, run_dir, replicas))

    def _set_schedulers(self, count: int) -> None:
        """Until each one that answers has heard it."""

        def heard() -> bool:
            self._client.set_schedulers(count)
            answers = self._client.ask_each(wait_s=1.0)
            return bool(answers) and all(each.schedulers == count for each in answers.values())

        self._wait(Program("scheduler", count - 1), heard)

    def _stop(self, program: Program) -> int:
        """Ends a process, letting it drain. Returns the pid that it had."""
        view = self._supervisor.find(program)
        self._tell(program.name, "draining")
        self._supervisor.stop(program)
        while (now := self._supervisor.find(program)) and now.pid:
            time.sleep(LOOK_S)
        return view.pid if view else 0

    def _wait_ready(self, program: Program, old_pid: int) -> None:
        def ready() -> bool:
            view, status = self._supervisor.find(program), self._client.ask(wait_s=1.0)
            return bool(view and view.pid not in (0, old_pid) and status and ready_as(status, program, view.pid))

        self._tell(program.name, "starting")
        self._wait(program, ready)

    def _wait(self, program: Program, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            view = self._supervisor.find(program)
            if view and view.state == "exited" and view.exit_status == EXIT_CONFIG:
                break
            if done():
                return
            time.sleep(LOOK_S)
        log = self._config.run_dir / "log" / f"{program.name}.log"
        raise Impossible(f"{program.name} did not get ready; its log is {log}")


def ready_as(status: Status, program: Program, pid: int) -> bool:
    """Whether a scheduler lists this very process as ready."""
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

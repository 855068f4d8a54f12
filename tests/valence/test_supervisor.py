"""A real supervisord with small programs in place of services."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.config import load
from valence.programs import Program, program_section, render
from valence.supervisor import Event, EventLog, Supervisor, SupervisorGone, parse_event, start

SLEEPER = "import time; time.sleep(600)"
A, B = Program("api", 0), Program("api", 1)


def configuration(run_dir: Path, scripts: dict[Program, str]) -> str:
    text = render(load(), run_dir, {"worker": 0, "scheduler": 0, "tokenizer": 0, "api": 0})
    for program, script in scripts.items():
        command = [sys.executable, "-P", "-c", script]
        text += program_section(program, command, {}, 5, run_dir / "log" / f"{program.name}.log")
    return text


@contextlib.contextmanager
def supervised(scripts: dict[Program, str]) -> Iterator[tuple[Supervisor, "Watch"]]:
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        run_dir = Path(folder)
        lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)
        daemon = start(run_dir, configuration(run_dir, scripts), lock)
        try:
            yield Supervisor(run_dir), Watch(run_dir)
        finally:
            daemon.terminate()
            while daemon.poll() is None:
                Supervisor(run_dir).wake()
            os.close(lock)


class Watch:
    """Waits for events; every look also wakes the supervisor."""

    def __init__(self, run_dir: Path) -> None:
        self._log = EventLog(run_dir)
        self._supervisor = Supervisor(run_dir)
        self.seen: list[Event] = []

    def until(self, wanted: Callable[[Event], bool]) -> Event:
        while True:
            for event in self._log.new():
                self.seen.append(event)
                if wanted(event):
                    return event
            self._supervisor.wake()


def test_programs_start_end_and_start_again() -> None:
    with supervised({A: SLEEPER, B: SLEEPER}) as (supervisor, watch):
        watch.until(lambda event: event.program == B and event.kind == "spawned")
        first, second = supervisor.processes()
        assert (first.program, second.program) == (A, B)
        assert first.state in ("starting", "running")
        assert psutil.Process(first.pid).is_running()
        supervisor.stop(A)
        assert watch.until(lambda event: event.kind == "stopped").program == A
        stopped = supervisor.find(A)
        assert stopped
        assert (stopped.pid, stopped.state) == (0, "stopped")
        supervisor.stop(A)  # stopping what is down is fine
        supervisor.start(A)
        again = watch.until(lambda event: event.kind == "spawned")
        assert again.program == A
        assert again.pid not in (0, first.pid)
        supervisor.start(A)  # and so is starting what is up


def test_a_killed_program_is_started_again() -> None:
    with supervised({A: SLEEPER}) as (_, watch):
        pid = watch.until(lambda event: event.kind == "spawned").pid
        os.kill(pid, signal.SIGKILL)
        ended = watch.until(lambda event: event.kind == "exited")
        assert (ended.detail, ended.exit_status) == ("terminated by SIGKILL", None)
        assert watch.until(lambda event: event.kind == "spawned").pid != pid


def test_exit_statuses_are_told() -> None:
    with supervised({A: "import sys; sys.exit(78)", B: SLEEPER}) as (_, watch):
        ended = watch.until(lambda event: event.kind == "exited")
        assert (ended.program, ended.exit_status) == (A, 78)


def test_programs_are_added_and_removed_while_others_run() -> None:
    with supervised({A: SLEEPER}) as (supervisor, watch):
        pid = watch.until(lambda event: event.kind == "spawned").pid
        file = supervisor.run_dir / "supervisord.conf"
        file.write_text(configuration(supervisor.run_dir, {A: SLEEPER, B: SLEEPER}))
        supervisor.add(B)
        watch.until(lambda event: event.program == B and event.kind == "spawned")
        supervisor.stop(B)
        watch.until(lambda event: event.program == B and event.kind == "stopped")
        file.write_text(configuration(supervisor.run_dir, {A: SLEEPER}))
        supervisor.remove(B)
        assert [(view.program, view.pid) for view in supervisor.processes()] == [(A, pid)]
        supervisor.remove(B)  # already gone is fine


def test_without_a_supervisor(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    assert not supervisor.alive()
    with pytest.raises(SupervisorGone, match=r"supervisor\.sock"):
        supervisor.processes()
    assert list(EventLog(tmp_path).new()) == []


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("x INFO spawned: 'api-0' with pid 42", Event(A, "spawned", pid=42)),
        ("x WARN exited: api-0 (exit status 78; not expected)", Event(A, "exited", "exit status 78", exit_status=78)),
        ("x INFO exited: api-1 (exit status 0; expected)", Event(B, "exited", "exit status 0", exit_status=0)),
        ("x WARN exited: api-0 (terminated by SIGKILL; not expected)", Event(A, "exited", "terminated by SIGKILL")),
        ("x WARN stopped: api-0 (exit status 0)", Event(A, "stopped", "exit status 0", exit_status=0)),
        ("x INFO success: api-0 entered RUNNING state, process has stayed up for > than 1 seconds", None),
        ("x INFO supervisord started with pid 1", None),
    ],
)
def test_events_are_read_from_log_lines(line: str, event: Event | None) -> None:
    assert parse_event(line) == event


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    file = tmp_path / "log" / "supervisord.log"
    file.write_text("x spawned: 'api-0' with pid 1\nx spawned: 'api-1' wi")
    log = EventLog(tmp_path)
    assert [event.program for event in log.new()] == [A]
    with file.open("a") as more:
        more.write("th pid 2\n")
    assert [event.pid for event in log.new()] == [2]
    assert list(log.new()) == []

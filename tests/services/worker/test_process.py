"""The worker as a real process on real sockets, with the null engine; the test plays the scheduler."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import recorder
from common.columns import pack_i32, unpack_i32
from common.protocol import (
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Member,
    Members,
    Peer,
    RowStart,
    Sampling,
    StepPlan,
    StepResult,
    ToScheduler,
    WorkerReady,
)
from common.recorder import Kind
from common.transport import Inbox, LinkCounters, Push

LIMIT_S = 240


class FakeScheduler:
    """The other end of the worker's links; a real inbox at the well-known address."""

    def __init__(self, run_dir: Path, incarnation: int = 1, instance: int = 0) -> None:
        endpoint = f"ipc://{run_dir}/scheduler{f'-{instance}' if instance else ''}"
        self.peer = Peer("scheduler", instance, incarnation, endpoint)
        self.inbox: Inbox = Inbox(self.peer.endpoint, ToScheduler, 1000, LinkCounters())
        self.seen: list = []
        self.push: Push | None = None
        self.worker: Peer | None = None

    def until(self, found: Callable[[object], bool]) -> object:
        """The first message, from now on, for which `found` holds."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            while self.seen:
                _, message = self.seen.pop(0)
                if found(message):
                    return message
            self.inbox.wait(1)
            self.seen += self.inbox.drain()
        raise AssertionError("the message did not come")

    def welcome(self) -> WorkerReady:
        """Answers a Hello and waits for WorkerReady."""
        self.worker = self.until(lambda m: isinstance(m, Hello)).peer
        self.push = Push(self.worker.endpoint, self.peer.incarnation, 1000, LinkCounters())
        self.tell_members([])
        return self.until(lambda m: isinstance(m, WorkerReady))

    def tell_members(self, departed: list[int], state: str = "ready", schedulers: int = 0) -> None:
        members = [Member(self.peer, "ready")]
        if self.worker.incarnation not in departed:
            members.append(Member(self.worker, state))
        self.push.send(Members(members, departed, Load(), schedulers=schedulers))

    def close(self) -> None:
        if self.push:
            self.push.close()
        self.inbox.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path)
    yield scheduler
    scheduler.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen]:
    settings = [f"links.run_dir={tmp_path}", "worker.kind=null", "kv.blocks=100", "links.heartbeat_s=0.05"]
    command = [sys.executable, "-m", "services.worker", *[f"--set={setting}" for setting in settings]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def plan(step: int, position: int, added: bool = False) -> StepPlan:
    row = RowStart(3, 70, pack_i32([5, 6]), 2, 0, pack_i32([0]), Sampling(max_tokens=9))
    return StepPlan(
        step,
        added=[row] if added else [],
        slots=pack_i32([3]),
        positions=pack_i32([0 if added else position]),
        counts=pack_i32([2 if added else 1]),
        samples=b"\x01",
    )


def run(scheduler: FakeScheduler, step_plan: StepPlan) -> list[int]:
    scheduler.push.send(step_plan)
    result = scheduler.until(lambda m: isinstance(m, StepResult))
    assert (result.step, result.error) == (step_plan.step, "")
    return unpack_i32(result.tokens).tolist()


def test_plans_are_answered_in_order(scheduler: FakeScheduler, worker: subprocess.Popen) -> None:
    ready = scheduler.welcome()
    assert (ready.model.num_blocks, ready.model.architecture, ready.model.name) == (
        100,
        "null",
        "SmolLM2-135M-Instruct",
    )
    for message in (plan(1, 0, added=True), plan(2, 2), plan(3, 3)):
        scheduler.push.send(message)
    results = [scheduler.until(lambda m: isinstance(m, StepResult)) for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    beat = scheduler.until(lambda m: isinstance(m, Heartbeat) and m.counters["steps"] == 3)
    assert beat.state == "ready"
    assert beat.progress >= 3


def test_a_step_is_recorded_before_it_runs(scheduler: FakeScheduler, worker: subprocess.Popen, tmp_path: Path) -> None:
    scheduler.welcome()
    for step_plan in (plan(1, 0, added=True), plan(2, 2)):
        run(scheduler, step_plan)
    broken = plan(3, 3)
    scheduler.push.send(StepPlan(3, slots=pack_i32([10_000]), positions=broken.positions, counts=broken.counts))
    worker.wait(LIMIT_S)
    (path,) = (tmp_path / recorder.FOLDER).iterdir()
    found = recorder.read(path)
    assert found is not None and [event.a for event in found.rings["steps"]] == [1, 2, 3]
    assert [(event.seq, event.a, event.code) for event in found.rings["requests"]] == [(70, 1, 3)]
    assert [event.kind for event in found.rings["life"]][-2:] == [Kind.FAULT, Kind.ENDED]


def test_a_new_scheduler_gets_a_fresh_worker(
    scheduler: FakeScheduler, worker: subprocess.Popen, tmp_path: Path
) -> None:
    scheduler.welcome()
    first = run(scheduler, plan(1, 0, added=True))
    scheduler.close()
    successor = FakeScheduler(tmp_path, incarnation=2)
    try:
        successor.worker, successor.push = scheduler.worker, Push(scheduler.worker.endpoint, 2, 100, LinkCounters())
        # As a real scheduler does, it calls the worker starting until it has its WorkerReady: the first ones may have
        # gone to the connection of the old scheduler.
        successor.tell_members([], "starting")
        while not isinstance(successor.until(lambda m: isinstance(m, (WorkerReady, Heartbeat))), WorkerReady):
            successor.tell_members([], "starting")
        assert run(successor, plan(1, 0, added=True)) == first
    finally:
        successor.close()


def test_ready_is_repeated_until_the_scheduler_plans_for_it(scheduler: FakeScheduler, worker: subprocess.Popen) -> None:
    scheduler.welcome()
    for state in ("starting", "failed"):
        scheduler.tell_members([], state)
        scheduler.until(lambda m: isinstance(m, WorkerReady))
    scheduler.tell_members([])
    scheduler.push.send(plan(1, 0, added=True))
    while not any(isinstance(message, StepResult) for _, message in scheduler.seen):
        scheduler.inbox.wait(1)
        scheduler.seen += scheduler.inbox.drain()
    assert not any(isinstance(message, WorkerReady) for _, message in scheduler.seen)


def test_plans_of_a_stranger_are_not_run(scheduler: FakeScheduler, worker: subprocess.Popen) -> None:
    scheduler.welcome()
    stranger = Push(scheduler.worker.endpoint, 99, 10, LinkCounters())
    stranger.send(plan(8, 0, added=True))
    scheduler.until(lambda m: isinstance(m, Heartbeat) and m.counters["link_received"] >= 2)
    stranger.close()
    run(scheduler, plan(1, 0, added=True))
    beat = scheduler.until(lambda m: isinstance(m, Heartbeat) and m.counters["steps"] > 0)
    assert beat.counters["steps"] == 1


def test_sigterm_says_goodbye_and_exits_zero(
    scheduler: FakeScheduler, worker: subprocess.Popen, tmp_path: Path
) -> None:
    scheduler.welcome()
    worker.send_signal(signal.SIGTERM)
    scheduler.until(lambda m: isinstance(m, Goodbye))
    assert worker.wait(LIMIT_S) == 0
    assert not list(tmp_path.glob("worker*"))  # its socket


def test_a_worker_that_was_given_up_ends_with_a_fault(scheduler: FakeScheduler, worker: subprocess.Popen) -> None:
    scheduler.welcome()
    scheduler.tell_members([scheduler.worker.incarnation])
    assert worker.wait(LIMIT_S) == 1
    assert "given this worker up" in worker.stderr.read()


def test_bad_settings_end_with_the_configuration_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.worker", f"--set=links.run_dir={tmp_path}", "--set=worker.knd=null"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 78
    assert "unknown key worker.knd; the nearest known key is worker.kind" in done.stderr


def test_a_worker_belongs_to_its_scheduler_and_follows_their_number(tmp_path: Path) -> None:
    """Worker 3: of two schedulers to the second, of three to the first; it stays the same process."""
    settings = [f"links.run_dir={tmp_path}", "worker.kind=null", "kv.blocks=100", "links.heartbeat_s=0.05"]
    options = [f"--set={setting}" for setting in (*settings, "services.scheduler.replicas=2")]
    process = subprocess.Popen([sys.executable, "-m", "services.worker", "--instance=3", *options])
    first, second = FakeScheduler(tmp_path, 1), FakeScheduler(tmp_path, 2, instance=1)
    try:
        second.welcome()
        tokens = run(second, plan(1, 0, added=True))
        second.push.send(plan(2, 2))
        second.tell_members([], schedulers=3)
        second.until(lambda m: isinstance(m, Goodbye))
        first.welcome()
        assert first.worker.pid == second.worker.pid and first.worker.incarnation != second.worker.incarnation
        # Late words of one that it has left. The first scheduler's plans are run as if they had not come.
        second.push.send(plan(3, 3))
        second.tell_members([], schedulers=3)
        seen = first.until(lambda m: isinstance(m, Heartbeat)).counters["link_received"]
        second.tell_members([], schedulers=3)
        first.until(lambda m: isinstance(m, Heartbeat) and m.counters["link_received"] > seen)
        assert run(first, plan(1, 0, added=True)) == tokens
        first.tell_members([], schedulers=2)
        first.until(lambda m: isinstance(m, Goodbye))
        second.push.close()
        assert second.welcome() and process.poll() is None
    finally:
        process.kill()
        process.wait()
        first.close()
        second.close()


def endless(tmp_path: Path) -> subprocess.Popen:
    """A worker whose first step does not end."""
    settings = [f"links.run_dir={tmp_path}", "worker.kind=null", "kv.blocks=100", "links.heartbeat_s=0.05"]
    settings += ["worker.step_us=1000000000", "links.drain_s=0.5"]
    command = [sys.executable, "-m", "services.worker", *[f"--set={setting}" for setting in settings]]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_worker_in_an_endless_step_beats_tells_so_and_ends_when_given_up(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    worker = endless(tmp_path)
    scheduler.welcome()
    scheduler.push.send(plan(1, 0, added=True))
    scheduler.until(lambda m: isinstance(m, Heartbeat) and m.counters["stalled_seconds"] > 0.2)
    beat = scheduler.until(lambda m: isinstance(m, Heartbeat))
    assert (beat.counters["work_owed"], beat.state) == (1, "ready")
    scheduler.tell_members([scheduler.worker.incarnation])
    _, errors = worker.communicate(timeout=LIMIT_S)
    assert worker.returncode == 1
    assert "the scheduler has given this worker up, 1 steps are not done" in errors


@pytest.mark.parametrize("signals", [1, 2])
def test_a_worker_in_an_endless_step_can_be_stopped(scheduler: FakeScheduler, tmp_path: Path, signals: int) -> None:
    worker = endless(tmp_path)
    scheduler.welcome()
    scheduler.push.send(plan(1, 0, added=True))
    # A worker that starts owes work, too: told to stop then, it would end in order.
    scheduler.until(lambda m: isinstance(m, Heartbeat) and m.state == "ready" and m.counters["work_owed"] == 1)
    for _ in range(signals):
        worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=LIMIT_S)
    assert worker.returncode == 1

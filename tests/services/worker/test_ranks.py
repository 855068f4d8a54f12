"""Rank 0 and its children, without a model: what they are told, and that they live and die together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from common import config as configuration
from common.config import Config
from common.errors import ConfigError
from common.protocol import ModelFacts, Progress, StepPlan
from services.worker import ranks
from services.worker.engine import Engine, Pending
from services.worker.null import Done
from services.worker.ranks import Join, LeadingEngine, Ranks

LIMIT_S = 240
FAKE = (sys.executable, "-m", "tests.services.worker.fake_rank")
FACTS = ModelFacts("m", "a", 10, 20, (2,), 16, 4)


def config_in(folder: Path, ranks: int) -> Config:
    return configuration.load(None, [f"links.run_dir={folder}", f"worker.tensor_parallel={ranks}"])


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come to be"
        time.sleep(0.01)


class Settled(Done):
    def __init__(self, seen: list[str]) -> None:
        super().__init__(b"", (b"", b""))
        self.seen = seen

    def settle(self) -> None:
        self.seen.append("settled")


class Noted:
    """An engine that notes what it is told."""

    facts, max_rows = FACTS, 7

    def __init__(self) -> None:
        self.seen: list[str] = []

    def execute(self, plan: StepPlan) -> Pending:
        self.seen.append(f"StepPlan {plan.step}")
        return Settled(self.seen)

    def figures(self) -> dict[str, float]:
        return {"startup_seconds": 1.0}

    def profile(self, folder: Path | None) -> None:
        self.seen.append(folder)

    def reset(self) -> None:
        self.seen.append("Reset")

    def close(self) -> None:
        self.seen.append("closed")


def test_every_rank_is_told_all_that_the_first_does(tmp_path: Path) -> None:
    others = Ranks(config_in(tmp_path, 3), 5, (*FAKE, str(tmp_path)))
    own = Noted()
    engine = LeadingEngine(own, others)
    assert (engine.facts, engine.max_rows, engine.figures()) == (FACTS, 7, {"startup_seconds": 1.0})
    engine.execute(StepPlan(1))
    engine.reset()
    for step in range(2, 6):
        engine.execute(StepPlan(step, slots=bytes(200_000)))
    engine.close()
    told = ["StepPlan 1", "Reset", *(f"StepPlan {step}" for step in range(2, 6))]
    assert own.seen == [*told, "closed"]
    for rank in (1, 2):
        assert (tmp_path / str(rank)).read_text().splitlines() == [f"5 3 {others.meeting}", *told]
    assert all(child.poll() == 0 for child in others.children), "they have ended, and were not killed"


def test_each_group_meets_in_a_file_of_its_own(tmp_path: Path) -> None:
    left, other = tmp_path / "worker-0.abc.ranks", tmp_path / "worker-1.abc.ranks"
    for path in (left, other):
        path.touch()
    made = [Ranks(config_in(tmp_path, 1), 0) for _ in range(2)]
    assert not left.exists() and other.exists(), "what a group left that was killed; another worker's is in use"
    assert made[0].meeting != made[1].meeting and not Path(made[0].meeting).exists()
    assert Path(made[0].meeting).parent == tmp_path


def test_no_rank_outlives_a_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def engine_at(join: Join, report: Callable[[Progress], None]) -> Engine:
        started.extend(child.pid for child in psutil.Process().children() if "fake_rank" in " ".join(child.cmdline()))
        raise ConfigError("no such device")

    monkeypatch.setattr(ranks, "engine_at", engine_at)
    monkeypatch.setattr(ranks, "Ranks", partial(Ranks, command=(*FAKE, str(tmp_path))))
    with pytest.raises(ConfigError, match="no such device"):
        ranks.lead(config_in(tmp_path, 3), lambda progress: None)
    assert len(started) == 2 and not any(psutil.pid_exists(pid) for pid in started)


LEADER = """
import signal, sys
from pathlib import Path
from services.worker.ranks import Ranks
from tests.services.worker.test_ranks import config_in
ranks = Ranks(config_in(Path(sys.argv[1]), 3), 0, sys.argv[2:])
print(*(child.pid for child in ranks.children), flush=True)
signal.pause()
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_leader(tmp_path: Path) -> Iterator[Start]:
    """Rank 0 of three, whose children run a command."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> "subprocess.Popen[str]":
        arguments = [sys.executable, "-c", LEADER, str(tmp_path), *command]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[0]

    yield start
    for leader in started:
        leader.kill()
        leader.communicate()


@pytest.mark.parametrize(("status", "wanted"), [("1", 1), ("0", 1), ("78", 78)])
def test_a_rank_that_ends_ends_the_group(start_leader: Start, status: str, wanted: int) -> None:
    """78: settings that cannot work, which no supervisor answers by a restart."""
    leader = start_leader(*FAKE, status)
    _, said = leader.communicate(timeout=LIMIT_S)
    assert leader.returncode == wanted
    assert f"ended with status {status}; the whole group ends, to start afresh" in said


def test_a_rank_that_is_killed_ends_the_group(start_leader: Start, tmp_path: Path) -> None:
    leader = start_leader(*FAKE, str(tmp_path))
    assert leader.stdout is not None
    first, second = map(int, leader.stdout.readline().split())
    os.kill(second, signal.SIGKILL)
    _, said = leader.communicate(timeout=LIMIT_S)
    assert leader.returncode == 1 and f"rank 2 (pid {second}) was ended by SIGKILL" in said
    until(lambda: not psutil.pid_exists(first))


def test_the_kernel_ends_the_ranks_with_the_first_one(start_leader: Start, tmp_path: Path) -> None:
    """Also those that are stopped, and so read no end of their socket."""
    leader = start_leader(sys.executable, "-m", "tests.services.worker.patient_rank")
    assert leader.stdout is not None
    children = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    until(lambda: all((tmp_path / f"{child.pid}.waits").exists() for child in children))
    for child in children:
        child.suspend()
    leader.kill()
    leader.communicate(timeout=LIMIT_S)
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))

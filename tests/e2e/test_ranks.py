"""One model divided between two processes on a CPU (gloo): its text is that of one process, and outlives either rank.

kill -9 of rank 1, kill -9 of rank 0, and a rank 1 that stands still in a collective, each under streams.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from benchmarks.system import System
from tests.e2e.scripted import small
from tests.e2e.steered import Steered
from tests.e2e.test_recovery import Stream, bodies, run, struck
from tests.e2e.test_workers import ready_workers, same, until, until_nothing_is_held

# other load makes everything slow; it is no measure
SETTINGS = (
    "worker.threads=1",
    "scheduler.max_rows=64",
    "kv.blocks=512",
    "model.dtype=float32",
)
ASKED = [(path, body | {"max_tokens": 24}) for path, body in bodies()[2:6]]  # greedy and seeded, one with two choices
START_S = 250.0
DEADLINE_S = 30
STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small one: that every family says by ranks what it says alone is proved in tests/services/worker."""
    return small(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def alone(model: tuple[str, ...]) -> list[Stream]:
    """What one process says."""
    with System(*SETTINGS, *model, start_s=START_S) as system:
        return asyncio.run(run(system, ASKED))


@pytest.fixture(scope="module")
def divided(model: tuple[str, ...]) -> Iterator[Steered]:
    more = "worker.tensor_parallel=2", f"scheduler.step_deadline_s={DEADLINE_S}"
    with Steered(*SETTINGS, *model, *more, start_s=START_S) as it:
        yield it


def second_rank(system: System) -> psutil.Process:
    """The process that runs now."""
    (found,) = [
        child
        for child in system.process_of("worker").children()
        if "services.worker.rank_child" in " ".join(child.cmdline())
    ]
    return found


def whole_again(system: System, gone: list[psutil.Process]) -> None:
    """A group of new processes is there, nothing of the old one is left, and no block is held."""
    until(lambda: ready_workers(system) == [0])
    until(lambda: not any(process.is_running() for process in gone))
    assert second_rank(system).is_running()
    until_nothing_is_held(system)
    assert len(list(system.run_dir.glob("worker-0.*.ranks"))) == 1, "a group that was killed has left its file"


def test_two_ranks_say_what_one_says(divided: Steered, alone: list[Stream]) -> None:
    same(alone, asyncio.run(run(divided, ASKED)))
    assert [p["instance"] for p in divided.status()["processes"] if p["service"] == "worker"] == [0]


def test_streams_do_not_notice_a_group_that_leaves_in_order(divided: Steered, alone: list[Stream]) -> None:
    """SIGTERM: its steps are finished, all ranks end, and the next group goes on."""
    gone = [divided.process_of("worker"), second_rank(divided)]
    same(alone, struck(divided, ASKED, [gone[0].terminate], STEPS))
    whole_again(divided, gone)


@pytest.mark.parametrize(
    "victim",
    [pytest.param(second_rank, marks=pytest.mark.long), lambda system: system.process_of("worker")],
    ids=["rank 1", "rank 0"],
)
def test_streams_end_as_if_no_rank_had_been_killed(
    divided: Steered, alone: list[Stream], victim: Callable[[System], psutil.Process]
) -> None:
    gone = [divided.process_of("worker"), second_rank(divided)]
    same(alone, struck(divided, ASKED, [lambda: victim(divided).kill()], STEPS))
    whole_again(divided, gone)


@pytest.mark.long
def test_a_rank_that_stands_still_ends_with_its_group(divided: Steered, alone: list[Stream]) -> None:
    """Rank 0 waits for it in a collective, until the step's deadline."""
    gone = [divided.process_of("worker"), second_rank(divided)]
    same(alone, struck(divided, ASKED, [lambda: os.kill(gone[1].pid, signal.SIGSTOP)], STEPS))
    whole_again(divided, gone)

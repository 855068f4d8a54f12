"""The other ranks of a tensor-parallel group, as rank 0 has them: it starts them, hands plans on, and ends with them.

To everybody else a group is one worker process: rank 0 alone receives plans and answers. Each other rank is a child
(rank_child.py) with a socket pair, over which it gets every plan before rank 0 runs it, and so in the same order. A
thread waits for the end of any of them and then ends this process; the kernel ends the children with it. So a group
leaves as a whole, and its successor is started like that of any worker (ADR 0026).
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from common.config import Config
from common.errors import EXIT_CONFIG
from common.protocol import Message, Progress, StepPlan
from common.run_dir import make_run_dir
from common.transport import new_incarnation
from services.worker.engine import Engine, Pending
from services.worker.placement import take_seat

log = logging.getLogger("worker")

COMMAND = (sys.executable, "-P", "-m", "services.worker.rank_child")
LEAVE_S = 5.0  # for children to end by themselves
SAY_S = 1.0  # a process that has closed its socket is about to have an exit status


class Join(Message, frozen=True):
    """The first message to a child. `meeting`: see group.Place."""

    rank: int
    instance: int
    meeting: str
    config: Config


class Reset(Message, frozen=True):
    """Forget all rows: another scheduler has taken over."""


FromLeader = Join | StepPlan | Reset


class Ranks:
    """Ranks 1 .. n - 1. Made by the main thread, which the kernel takes for the parent."""

    def __init__(self, config: Config, instance: int, command: Sequence[str] = COMMAND) -> None:
        folder = config.run_dir
        make_run_dir(folder)
        for left in folder.glob(f"worker-{instance}.*.ranks"):  # by groups that were killed
            left.unlink(missing_ok=True)
        self.meeting = str(folder / f"worker-{instance}.{new_incarnation():x}.ranks")
        self.count = config.worker.tensor_parallel
        self.children: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._leaving = False
        for rank in range(1, self.count):
            self._start(command)
            self._links[-1].send_bytes(self._encoder.encode(Join(rank, instance, self.meeting, config)))
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [*command, str(theirs.fileno()), str(os.getpid())]
            self.children.append(subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)))
        self._links.append(Connection(ours.detach()))

    def tell(self, message: StepPlan | Reset) -> None:
        """To all, in order. Raises OSError if one has gone."""
        frame = self._encoder.encode(message)
        for link in self._links:
            link.send_bytes(frame)

    def _watch(self) -> None:
        """The main thread may wait in a collective for the one that has died."""
        gone = wait(self._links)[0]
        if self._leaving:
            return
        rank = self._links.index(gone) + 1  # type: ignore[arg-type]
        child = self.children[rank - 1]
        try:
            status: int | None = child.wait(SAY_S)
        except subprocess.TimeoutExpired:
            status = None
        how = "has closed its link" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        log.critical("rank %d (pid %d) %s; the whole group ends, to start afresh", rank, child.pid, how)
        os._exit(EXIT_CONFIG if status == EXIT_CONFIG else 1)

    def kill(self) -> None:
        """A start that has failed here is over for all."""
        self._leaving = True
        for child in self.children:
            child.kill()
        self.join()

    def dismiss(self) -> None:
        """Nothing more will be told: the children do what they have been told, and end."""
        self._leaving = True
        for link in self._links:
            with socket.socket(fileno=os.dup(link.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits for the end of all, which is near; those that do not end are killed."""
        for child in self.children:
            try:
                child.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._watcher.join(LEAVE_S)
        for link in self._links:
            link.close()


class LeadingEngine:
    """Rank 0's engine: whatever it is to do, the others are told first. An `Engine`."""

    def __init__(self, own: Engine, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.facts, self.max_rows = own.facts, own.max_rows

    def execute(self, plan: StepPlan) -> Pending:
        self._ranks.tell(plan)
        return self._own.execute(plan)

    def profile(self, folder: Path | None) -> None:
        """Of this rank: the others do the same."""
        self._own.profile(folder)

    def reset(self) -> None:
        self._ranks.tell(Reset())
        self._own.reset()

    def figures(self) -> dict[str, float]:
        return self._own.figures()

    def close(self) -> None:
        self._ranks.dismiss()
        self._own.close()
        self._ranks.join()


def engine_at(join: Join, report: Callable[[Progress], None]) -> Engine:
    """The model engine of one rank, which waits for the others. torch is imported here."""
    config = join.config
    seat = take_seat(config, join.instance, rank=join.rank)
    from services.worker.group import Place
    from services.worker.model_engine import ModelEngine

    return ModelEngine(config, report, seat.number, Place(join.rank, config.worker.tensor_parallel, join.meeting))


def lead(config: Config, report: Callable[[Progress], None], instance: int = 0) -> LeadingEngine:
    """A group's engine, with all its ranks."""
    ranks = Ranks(config, instance)
    with ExitStack() as failed:
        failed.callback(ranks.kill)
        engine = LeadingEngine(engine_at(Join(0, instance, ranks.meeting, config), report), ranks)
        failed.pop_all()
    return engine

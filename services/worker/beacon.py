"""The worker's heartbeat thread: beats while the main thread loads weights, runs a long step, or hangs in one.

Reads plain attributes that only the main thread writes, also to whom it beats; owns its socket. What it reports tells
a slow step from a stuck one. It ends the process where the main thread cannot: when the scheduler has given it up, at a
second signal, and when it does not stop in time.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from common.lifecycle import Process
from common.metrics import checked
from common.protocol import Heartbeat, Hello, Progress, State
from common.pulse import Pulses, Work
from common.transport import LinkCounters, Push
from services.worker.mailbox import Mailbox

log = logging.getLogger("worker")
HUNG_S = 1.0  # a main thread that has not looked into its inbox for so long may be stuck
LEAVE_S = 2.0  # beyond the drain time, for what the main thread has to close
QUIT = 0  # through the pipe: the end of the thread; everything else there is the number of a signal


class Place(NamedTuple):
    """Where it beats, and as whom."""

    endpoint: str
    hello: Hello


class Beacon(threading.Thread):
    """`received` and `finished` count steps; `progress` also counts what a start has done."""

    def __init__(
        self, process: Process, place: Place, metrics: Callable[[], dict[str, float]], mailbox: Mailbox
    ) -> None:
        super().__init__(name="beacon", daemon=True)
        self.state: State = "starting"
        self.progress = self.received = self.finished = 0
        self.stage: Progress | None = None
        self.joined = False
        self.place = place
        self._process, self._metrics, self._mailbox = process, metrics, mailbox
        self._pulses = Pulses(process.beat_gap_s)
        self._pulses.add(self._work)
        self._read, self.signals = os.pipe()
        for fd in (self._read, self.signals):
            os.set_blocking(fd, False)
        self._asked_s: float | None = None  # when this process was first told to stop

    def run(self) -> None:
        links = self._process.config.links
        place = self.place
        push = self._push(place)
        while True:
            if self.place is not place:
                push.close()
                place = self.place
                push = self._push(place)
            if not self.joined:
                push.send(place.hello)
            values = checked(self._metrics() | self._process.usage() | self._pulses.figures(time.monotonic()))
            push.send(Heartbeat(self.state, self.progress, self.stage, values))
            if self._rest(links.heartbeat_s if self.joined else 0.1):
                break
            self._look()
        push.close()

    def _push(self, place: Place) -> Push:
        links = self._process.config.links
        return Push(place.endpoint, place.hello.peer.incarnation, links.queue, counters=LinkCounters())

    def end(self) -> None:
        os.write(self.signals, bytes([QUIT]))
        self.join(timeout=LEAVE_S)

    def _work(self) -> Work:
        """A start is work, too."""
        if self.state == "starting":
            return 1, self.progress
        return self.received - self.finished, self.finished

    def _rest(self, wait_s: float) -> bool:
        """Until the next beat or signal; True at the end. Python runs signal handlers in the main thread only."""
        if not select.select([self._read], [], [], wait_s)[0]:
            return False
        numbers = os.read(self._read, 64)
        if QUIT in numbers:
            return True
        if self._asked_s is not None or len(numbers) > 1:
            log.warning("told to stop twice; ending at once")
            os._exit(1)
        self._asked_s = time.monotonic()
        return False

    def _look(self) -> None:
        """Whether the process must end although its main thread does not."""
        now_s = time.monotonic()
        if self._asked_s is not None and now_s - self._asked_s > self._process.config.links.drain_s + LEAVE_S:
            self._exit("the main thread did not stop in time")
        if now_s - self._mailbox.looked_s < HUNG_S:
            return
        own = self._process.incarnation
        if any(own in members.departed for members in self._mailbox.peek()):
            self._exit(f"the scheduler has given this worker up, {self.received - self.finished} steps are not done")

    def _exit(self, reason: str) -> None:
        log.critical("%s; ending, to start afresh", reason)
        os._exit(1)

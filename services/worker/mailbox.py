"""The worker's inbox, read by the main thread; by the beacon while the main thread is stuck in one call.

A call into a driver may never return, and the word that this process was given up lies in the inbox. A lock lets one
thread at a time use the socket; what the beacon took out waits here, in order, for the main thread.
"""

import threading
import time

from common.protocol import Members, ToWorker
from common.transport import Inbox

Received = tuple[int, ToWorker]


class Mailbox:
    """`wait` and `drain` are the main thread's, `peek` is the beacon's."""

    def __init__(self, inbox: Inbox[ToWorker]) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._kept: list[Received] = []
        self.looked_s = time.monotonic()  # when the main thread was last here

    def wait(self, timeout_s: float) -> bool:
        """True when there is something to drain, False after the time-out."""
        with self._lock:
            found = bool(self._kept) or self._inbox.wait(timeout_s)
        self.looked_s = time.monotonic()
        return found

    def drain(self) -> list[Received]:
        """All that has come, oldest first."""
        with self._lock:
            batch = self._inbox.drain()
            if self._kept:
                batch, self._kept = self._kept + batch, []
        return batch

    def peek(self) -> list[Members]:
        """The members told since the last look, without taking anything from the main thread.

        Of several lists of one scheduler only the newest is kept: a start takes minutes, and one comes per heartbeat.
        """
        if not self._lock.acquire(blocking=False):
            return []  # the main thread waits in there, so it reads by itself
        try:
            batch = self._inbox.drain()
            told = {sender for sender, message in batch if isinstance(message, Members)}
            old = [each for each in self._kept if not (each[0] in told and isinstance(each[1], Members))]
            self._kept = old + batch
        finally:
            self._lock.release()
        return [message for _, message in batch if isinstance(message, Members)]

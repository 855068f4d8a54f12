"""The worker's heartbeat thread: beats while the main thread loads weights or runs a long step.

Reads plain attributes that only the main thread writes, also to whom it beats; owns its socket. `progress` lets the
scheduler tell a slow step from a stuck one.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from common.lifecycle import Process
from common.metrics import checked
from common.protocol import Heartbeat, Hello, Progress, State
from common.transport import LinkCounters, Push


class Place(NamedTuple):
    """Where it beats, and as whom."""

    endpoint: str
    hello: Hello


class Beacon(threading.Thread):
    def __init__(self, process: Process, place: Place, metrics: Callable[[], dict[str, float]]) -> None:
        super().__init__(name="beacon", daemon=True)
        self.state: State = "starting"
        self.progress = 0
        self.stage: Progress | None = None
        self.joined = False
        self.place = place
        self._process, self._metrics = process, metrics
        self._ended = threading.Event()

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
            values = checked(self._metrics() | self._process.usage())
            push.send(Heartbeat(self.state, self.progress, self.stage, values))
            if self._ended.wait(links.heartbeat_s if self.joined else 0.1):
                break
        push.close()

    def _push(self, place: Place) -> Push:
        links = self._process.config.links
        return Push(place.endpoint, place.hello.peer.incarnation, links.queue, counters=LinkCounters())

    def end(self) -> None:
        self._ended.set()
        self.join(timeout=2.0)

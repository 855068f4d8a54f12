"""The worker's heartbeat thread: beats while the main thread loads weights or runs a long step.

Reads plain attributes that only the main thread writes; owns its socket. `progress` lets the scheduler tell a slow
step from a stuck one.
"""

import threading
from collections.abc import Callable

from common.lifecycle import Process, scheduler_endpoint
from common.metrics import checked
from common.protocol import Heartbeat, Hello, Progress, State
from common.transport import LinkCounters, Push


class Beacon(threading.Thread):
    def __init__(self, process: Process, hello: Hello, metrics: Callable[[], dict[str, float]]) -> None:
        super().__init__(name="beacon", daemon=True)
        self.state: State = "starting"
        self.progress = 0
        self.stage: Progress | None = None
        self.joined = False
        self._process, self._hello, self._metrics = process, hello, metrics
        self._ended = threading.Event()

    def run(self) -> None:
        links = self._process.config.links
        push = Push(
            scheduler_endpoint(self._process.config), self._process.incarnation, links.queue, counters=LinkCounters()
        )
        while True:
            if not self.joined:
                push.send(self._hello)
            values = checked(self._metrics() | self._process.usage())
            push.send(Heartbeat(self.state, self.progress, self.stage, values))
            if self._ended.wait(links.heartbeat_s if self.joined else 0.1):
                break
        push.close()

    def end(self) -> None:
        self._ended.set()
        self.join(timeout=2.0)

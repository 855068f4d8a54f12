"""Slow clients: what does not fit their buffer is not computed, and who reads nothing for long is given up.

When a stream's buffer is full its sequences are paused: they leave the worker and give their blocks up, and go on, from
where they are, when the client has read everything. The buffer may hold twice its limit, for what is on its way to
it meanwhile; a client whose scheduler cannot be told is cut there. Pauses are repeated while rows come, since a new
scheduler knows nothing of them. Owns nothing: the hub and the streams call.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.protocol import Pause
from services.api.figures import Figures

if TYPE_CHECKING:
    from services.api.hub import Request, Send

SCHEDULER = 0  # as receiver of a Send


def hold_back(request: "Request", unread: int, send: "Send", figures: Figures) -> bool:
    """`unread` rows of a choice wait, more than the limit. False if there is no room for more."""
    limit = request.limit
    if unread > 2 * limit:
        figures.slow_clients += 1
        return False
    if (unread - limit - 1) % (limit // 4 + 1) == 0:
        figures.pauses += not request.paused
        request.paused = True
        _tell(request, send, True)
    return True


def go_on(request: "Request", send: "Send") -> None:
    """The client has taken all that waited for it. It stays paused, to be tried again, if the link is full."""
    if request.paused and _tell(request, send, False):
        request.paused = False


def _tell(request: "Request", send: "Send", paused: bool) -> bool:
    sent = [send(SCHEDULER, Pause(each.origin, paused)) for each in request.choices if each.finished is None]
    return all(sent)


class Patience:
    """Calls `lose` after `wait_s` in which it was not stopped; starting it while it runs changes nothing."""

    def __init__(self, wait_s: float, lose: Callable[[], None]) -> None:
        self.wait_s = wait_s
        self._lose = lose
        self.timer: asyncio.TimerHandle | None = None  # None: it does not wait

    def start(self) -> None:
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(self.wait_s, self._lose)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

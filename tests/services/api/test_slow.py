"""Pauses of slow clients; test_hub.py and test_generate.py have them at work."""

from typing import Any

from common.protocol import Pause
from services.api import slow
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from tests.services.api.system import SUBMIT


def opened(limit: int) -> Request:
    hub = Hub(Routes(0, 1), 10, lambda peer, message: True, Figures(), 30.0)
    return hub.open([SUBMIT], [], 0.0, limit)


def test_pauses_are_repeated_while_rows_come_and_end_at_twice_the_limit() -> None:
    for limit in (1, 2, 8, 100):
        request, figures, sent = opened(limit), Figures(), []

        def send(peer: int, message: Any, sent: list[Any] = sent) -> bool:
            sent.append(message)
            return peer == slow.SCHEDULER

        held = [slow.hold_back(request, unread, send, figures) for unread in range(limit + 1, 2 * limit + 2)]
        assert held == [True] * limit + [False]
        assert sent == [Pause(request.choices[0].origin, True)] * len(sent) and 1 <= len(sent) <= 5
        assert (figures.pauses, figures.slow_clients) == (1, 1)


def test_who_is_not_paused_is_not_resumed() -> None:
    def send(peer: int, message: Any) -> bool:
        raise AssertionError

    slow.go_on(opened(4), send)

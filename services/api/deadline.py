"""The time a request may take, counted from its arrival: what its field, its header and the settings say of it.

Owns nothing. When the time is over the request fails like any other: its work is aborted, its blocks are freed, and
the client is told once, by status 504 or, in an open stream, by an error event.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest

from common.config import Api
from common.errors import Reject, RejectReason
from services.api.errors import invalid
from services.api.hub import Hub, Request

HEADER = "x-request-timeout-ms"
MAX_MS = 2**31 - 1


def left_s(http: HttpRequest, api: Api, field_ms: int | None = None) -> float | None:
    """Seconds that are left; None: no deadline. Raises Reject if there are none, or the header is no number.

    The shorter of field and header counts, `api.deadline_s` without both, and `api.max_deadline_s` bounds all.
    """
    asked_ms = [ms for ms in (field_ms, _of_header(http.headers.get(HEADER))) if ms is not None]
    budget_s = min(asked_ms) / 1000 if asked_ms else api.deadline_s
    if api.max_deadline_s:
        budget_s = min(budget_s or api.max_deadline_s, api.max_deadline_s)
    if not budget_s:
        return None
    left: float = http.scope["state"]["arrived_s"] + budget_s - time.monotonic()
    if left <= 0:
        raise passed()
    return left


def _of_header(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_MS):
        raise invalid(f"{HEADER} must be a whole number of milliseconds, at least 1", HEADER)
    return int(text)


def passed() -> Reject:
    return Reject(RejectReason.DEADLINE, "the deadline of the request has passed")


def set_alarm(hub: Hub, request: Request, wait_s: float | None) -> asyncio.TimerHandle | None:
    """Fails the request after `wait_s`, unless the returned timer is cancelled or it has ended by then."""
    if wait_s is None:
        return None

    def ring() -> None:
        hub.fail(request, passed())
        hub.flush()

    return asyncio.get_running_loop().call_later(wait_s, ring)


@contextlib.asynccontextmanager
async def within(wait_s: float | None) -> AsyncIterator[None]:
    """Raises Reject if the block takes longer."""
    try:
        async with asyncio.timeout(wait_s):
            yield
    except TimeoutError as error:
        raise passed() from error

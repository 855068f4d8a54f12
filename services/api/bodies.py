"""How many bytes of request bodies this replica holds at once. Pure; owned by the gateway, used from the event loop.

A body counts from its first byte until its request has been answered, because the request keeps its prompt as long.
"""

from common.errors import Reject, RejectReason


class Bodies:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Hold:
    """One request's part. `release` it at the end, whatever that is."""

    __slots__ = ("_bodies", "_own")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._own = 0

    def add(self, count: int) -> None:
        """So many bytes have come. Raises Reject if all together are too many; one that is alone may be as large as
        a body may be."""
        bodies = self._bodies
        self._own += count
        bodies.held += count
        if bodies.held > bodies.limit and bodies.held > self._own:
            raise Reject(RejectReason.OVERLOADED, f"{bodies.limit} bytes of requests are held already, try again later")

    def release(self) -> None:
        self._bodies.held -= self._own
        self._own = 0

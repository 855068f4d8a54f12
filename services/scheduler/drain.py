"""How fast the queue empties, for the time that a new request would wait. Pure; owned by the core."""

MEMORY_S = 10.0  # older figures count less and less


class DrainRate:
    """Tokens that leave the queue per second. What left an empty queue says nothing: there was no more to take."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._before: tuple[float, int] | None = None  # time and count of the last look, if somebody waited

    def look(self, now_s: float, drained: int, waiting: int) -> None:
        """`drained`: tokens that have ever left the queue; `waiting`: tokens in it."""
        if self._before is not None:
            then_s, before = self._before
            passed_s = now_s - then_s
            if passed_s > 0:
                share = passed_s / (passed_s + MEMORY_S) if self._rate else 1.0
                self._rate += share * ((drained - before) / passed_s - self._rate)
        self._before = (now_s, drained) if waiting else None

    def wait_s(self, waiting: int) -> float:
        """Until so many tokens have left; 0 also where nothing is known."""
        return waiting / self._rate if self._rate > 0 else 0.0

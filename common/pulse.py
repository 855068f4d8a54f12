"""Whether a process gets on with its work, and whether the one that judges was itself running. Pure: time is handed in.

A process owes work (requests, texts, plans) and counts what it has done. `Pulse` tells for how long work has waited
while none was done; each process reports that with its heartbeat, under the names of `figures`. `Rhythm` keeps a judge
from blaming others for the time in which it was stopped itself (SIGSTOP, a suspended machine, no processor).
"""

from collections.abc import Callable, Mapping

Work = tuple[int, int]  # pieces that wait for this process or run in it, pieces done since its start
OWED, STALLED = "work_owed", "stalled_seconds"


class Pulse:
    """One kind of work. Time between two looks counts for at most `most_s`: in the rest nobody was running."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_s = float("-inf")
        self._done = -1
        self._stalled_s = 0.0

    def look(self, now_s: float, work: Work) -> float:
        """Seconds for which work has waited and none was done. `now_s` is any monotonic clock."""
        owed, done = work
        elapsed_s, self._looked_s = min(now_s - self._looked_s, self._most_s), now_s
        if owed > 0 and done == self._done:
            self._stalled_s += elapsed_s
        else:
            self._done, self._stalled_s = done, 0.0
        return self._stalled_s


class Pulses:
    """All kinds of work of one process, looked at with each heartbeat; the one that has stood still longest counts."""

    def __init__(self, most_s: float) -> None:
        self.last: dict[str, float] = {}  # the newest figures
        self._most_s = most_s
        self._pulses: list[tuple[Callable[[], Work], Pulse]] = []

    def add(self, work: Callable[[], Work]) -> None:
        self._pulses.append((work, Pulse(self._most_s)))

    def figures(self, now_s: float) -> dict[str, float]:
        """By the names of common/metrics.py."""
        looks = [((found := work())[0], pulse.look(now_s, found)) for work, pulse in self._pulses]
        owed = sum(owed for owed, _ in looks)
        self.last = {OWED: float(owed), STALLED: max((stalled_s for _, stalled_s in looks), default=0.0)}
        return self.last


def standstill(counters: Mapping[str, float], after_s: float) -> str:
    """Why a process that reported these figures is not healthy; empty if it is."""
    stalled_s = counters.get(STALLED, 0.0)
    if stalled_s <= after_s:
        return ""
    return f"nothing done for {stalled_s:.0f} s, {counters.get(OWED, 0.0):.0f} waiting"


class Rhythm:
    """Looks of a judge that should come at least every `most_s`."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_s = float("-inf")

    def steady(self, now_s: float) -> bool:
        """False at the first look and after a gap: what others sent meanwhile has not been read, so nobody is late."""
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        return gap_s <= self._most_s

"""Which processes hang and must be killed: those that the scheduler has lost, and the scheduler itself. Pure.

`valence serve` hands in what supervisor and scheduler say, twice a second, and kills whoever is chosen; the supervisor
starts it anew. Nobody is chosen while it starts, drains or is being stopped; nobody but a scheduler while one does not
answer, as the others may be known to that one only; and nobody right after a time in which this process was stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common.config import Links
from common.protocol import Member, State, Status
from common.pulse import Rhythm, standstill
from valence.programs import Program
from valence.supervisor import ProcessView

ROUND_S = 0.5
GAP_S = 2.0  # rounds further apart than this: this process was stopped
START_S = 300.0  # from a process's start until it must have joined; loading its model comes after that
GONE_S = 1.0  # for one that the scheduler has given up, to end by itself
LEAVE_S = 15.0  # for one that has left in order
REPLACED_WHEN_STALLED = ("tokenizer", "scheduler")  # a worker has its step deadline; an API waits for others


class Verdict(NamedTuple):
    """One process to kill, and why."""

    program: Program
    pid: int
    reason: str


@dataclass(slots=True)
class Mark:
    """What is known of one pid."""

    well_s: float  # when it was last well, or nothing could be known
    joined: bool = False  # some scheduler has listed it; the scheduler itself: it has answered
    listed_by: frozenset[int] = frozenset()  # incarnations of the schedulers that answered when one last did
    state: State = "starting"  # of its last heartbeat
    judged: bool = False


class Watch:
    def __init__(self, links: Links) -> None:
        self._dead_after_s, self._stalled_after_s = links.dead_after_s, links.stalled_after_s
        self._rhythm = Rhythm(max(GAP_S, links.dead_after_s / 2))
        self._marks: dict[int, Mark] = {}
        self._schedulers: frozenset[int] = frozenset()  # incarnations that answered last

    def look(self, views: Iterable[ProcessView], status: Status | None, now_s: float) -> list[Verdict]:
        """One round. `status` is what schedulers have answered in it, if any has; `now_s` is any monotonic clock."""
        steady = self._rhythm.steady(now_s)
        up = {view.pid: view.program for view in views if view.pid and view.state in ("running", "starting")}
        self._marks = {pid: self._marks.get(pid) or Mark(now_s) for pid in up}
        members = {member.peer.pid: member for member in status.members} if status else {}
        silent = any(program.service == "scheduler" and pid not in members for pid, program in up.items())
        unknown = self._new_scheduler(members) or silent or status is None
        verdicts = []
        for pid, program in up.items():
            mark, member = self._marks[pid], members.get(pid)
            if member is not None and member.peer.service == program.service:
                mark.joined, mark.listed_by, mark.state, mark.well_s = True, self._schedulers, member.state, now_s
                reason = self._stands_still(program, member)
            else:
                if not steady or (unknown and program.service != "scheduler"):
                    mark.well_s = now_s
                reason = self._is_missing(program, mark, now_s)
            if reason and steady and not mark.judged:
                mark.judged = True
                verdicts.append(Verdict(program, pid, reason))
        return verdicts

    def _new_scheduler(self, members: dict[int, Member]) -> bool:
        """Whether another one answers: it learns who is there within a few beats."""
        found = frozenset(m.peer.incarnation for m in members.values() if m.peer.service == "scheduler")
        changed = bool(found - self._schedulers)
        self._schedulers = found or self._schedulers
        return changed

    def _stands_still(self, program: Program, member: Member) -> str:
        if program.service not in REPLACED_WHEN_STALLED or member.state != "ready":
            return ""
        return standstill(member.counters, self._stalled_after_s)

    def _is_missing(self, program: Program, mark: Mark, now_s: float) -> str:
        missing_s = now_s - mark.well_s
        if not mark.joined:
            return f"it has not joined for {missing_s:.0f} s" if missing_s > START_S else ""
        if program.service == "scheduler":
            return f"it has not answered for {missing_s:.1f} s" if missing_s > self._dead_after_s else ""
        # One whose scheduler has left looks for another one.
        allowed_s = GONE_S if mark.listed_by == self._schedulers else self._dead_after_s
        if mark.state == "draining":
            allowed_s = max(allowed_s, LEAVE_S)
        return "the scheduler has given it up" if missing_s > allowed_s else ""

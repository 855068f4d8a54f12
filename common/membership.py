"""A process's view of the others, made from the scheduler's `Members` messages. Pure.

Owned by the process that receives the messages; tells what joined and what left since the message before.
"""

from typing import NamedTuple

from common.protocol import Load, Member, Members, ModelFacts, Peer

MISSED_BEATS = 2.5


class Change(NamedTuple):
    joined: list[Peer]
    left: list[Peer]
    new_scheduler: bool  # another scheduler process has taken over (or is seen for the first time)


class Membership:
    def __init__(self) -> None:
        self.members: dict[int, Member] = {}  # by incarnation
        self.departed: frozenset[int] = frozenset()
        self.load = Load()
        self.model: ModelFacts | None = None
        self.scheduler = 0  # incarnation of the scheduler that spoke last
        self.heard_s = float("-inf")

    def update(self, sender: int, message: Members, now_s: float) -> Change:
        """Takes the newest message. `now_s` is any monotonic clock."""
        known = self.members
        self.members = {member.peer.incarnation: member for member in message.members}
        self.departed = frozenset(message.departed)
        self.load, self.model, self.heard_s = message.load, message.model, now_s
        changed, self.scheduler = sender != self.scheduler, sender
        return Change(
            joined=[member.peer for key, member in self.members.items() if key not in known],
            left=[member.peer for key, member in known.items() if key not in self.members],
            new_scheduler=changed,
        )

    def silent(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether the scheduler has missed beats: the next one to speak may be a new one that does not know us."""
        return now_s - self.heard_s > MISSED_BEATS * heartbeat_s

    def ready(self, service: str) -> list[Peer]:
        """Peers of a service that take new work, lowest instance first."""
        found = [m.peer for m in self.members.values() if m.peer.service == service and m.state == "ready"]
        return sorted(found, key=lambda peer: peer.instance)

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


def by_scheduler(sender: int, message: Members) -> bool:
    """Whether a Members is a scheduler's own: it lists its sender as one. Nobody else may say who is alive."""
    return any(m.peer.incarnation == sender and m.peer.service == "scheduler" for m in message.members)


class Membership:
    """`own`: incarnation of the owner. `grace_s`: how long a new scheduler may take to hear of everybody.

    During that time a peer that only the old scheduler knew still counts as a member, so that nothing that runs on it
    is given up; unless it departed or was replaced.
    """

    def __init__(self, own: int = 0, grace_s: float = 0.0) -> None:
        self._own, self._grace_s = own, grace_s
        self._grace_end_s = float("-inf")
        self.members: dict[int, Member] = {}  # by incarnation
        self.departed: frozenset[int] = frozenset()
        self.load = Load()
        self.model: ModelFacts | None = None
        self.scheduler = 0  # incarnation of the scheduler that spoke last
        self.heard_s = float("-inf")

    def update(self, sender: int, message: Members, now_s: float) -> Change:
        """Takes the newest message. `now_s` is any monotonic clock."""
        known = self.members
        changed = sender != self.scheduler
        if changed and self.scheduler:
            self._grace_end_s = now_s + self._grace_s
        self.members = {member.peer.incarnation: member for member in message.members}
        self.departed = frozenset(message.departed)
        self.load, self.model, self.heard_s = message.load, message.model, now_s
        self.scheduler = sender
        if now_s < self._grace_end_s:
            self._keep(known)
        return Change(
            joined=[member.peer for key, member in self.members.items() if key not in known],
            left=[member.peer for key, member in known.items() if key not in self.members],
            new_scheduler=changed,
        )

    def _keep(self, known: dict[int, Member]) -> None:
        """Members whom a new scheduler has not heard of yet."""
        listed = {(member.peer.service, member.peer.instance) for member in self.members.values()}
        for key, member in known.items():
            place = (member.peer.service, member.peer.instance)
            if key != self._own and key not in self.departed and place not in listed:
                self.members[key] = member

    def silent(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether the scheduler has missed beats: the next one to speak may be a new one that does not know us."""
        return now_s - self.heard_s > MISSED_BEATS * heartbeat_s

    def ready(self, service: str) -> list[Peer]:
        """Peers of a service that take new work, lowest instance first."""
        found = [m.peer for m in self.members.values() if m.peer.service == service and m.state == "ready"]
        return sorted(found, key=lambda peer: peer.instance)

"""Who is a member: the scheduler's registry of processes. Pure; owned and called by process.py.

One live incarnation per (service, instance): a Hello of a new one replaces the old, which departs. An incarnation that
has departed never comes back; the last `KEEP_DEPARTED` are told to everybody so that their frames are dropped.
A worker counts as ready only when the scheduler plans for it (`judge`), whatever it says of itself.
"""

from collections import deque

import msgspec

from common.ledger import Ledger, join, retire
from common.protocol import Heartbeat, Hello, Load, Member, Members, ModelFacts, Peer, ServiceName, State
from common.pulse import Rhythm

KEEP_DEPARTED = 256
STARTS = 12  # times as long may be silent who starts: libraries and drivers are loaded under Python's lock


class Registry:
    """`own` is the scheduler's own entry; `roots` are the endpoint prefixes that peers may name."""

    def __init__(self, own: Peer, roots: tuple[str, ...], dead_after_s: float, beat_gap_s: float = 3.0) -> None:
        self._own = own.incarnation
        self._roots = roots
        self._dead_after_s = dead_after_s
        self._looked_s = float("inf")  # when `silent` was last asked; at first nothing was missed
        self._members: dict[int, Member] = {own.incarnation: Member(own, "ready")}
        self._heard_s: dict[int, float] = {}
        self._departed: deque[int] = deque(maxlen=KEEP_DEPARTED)
        self._judged: dict[int, State] = {}  # workers
        self._figures: dict[int, dict[str, float]] = {}  # of workers, by the scheduler
        self.ledger: Ledger = {}  # what those have counted that have departed
        self.rhythm = Rhythm(beat_gap_s)  # asked before `silent`, with every beat

    @property
    def departed(self) -> frozenset[int]:
        return frozenset(self._departed)

    def allowed(self, endpoint: str) -> bool:
        """Whether a message may be sent to that address: a peer never chooses a file or host for us."""
        return endpoint.startswith(self._roots) and ".." not in endpoint

    def service_of(self, incarnation: int) -> ServiceName | None:
        member = self._members.get(incarnation)
        return member.peer.service if member else None

    def name(self, incarnation: int) -> str:
        """For people."""
        member = self._members.get(incarnation)
        return f"{member.peer.service}-{member.peer.instance}" if member else f"{incarnation:x}"

    def find(self, service: str, instance: int) -> Peer | None:
        for member in self._members.values():
            if member.peer.service == service and member.peer.instance == instance:
                return member.peer
        return None

    def hello(self, sender: int, hello: Hello, now_s: float) -> tuple[Peer | None, Peer | None]:
        """(the peer that joined, the peer that it replaces); (None, None) for a repeat or an unacceptable Hello."""
        peer = hello.peer
        if sender != peer.incarnation or sender in self._departed or not self.allowed(peer.endpoint):
            return None, None
        self._heard_s[sender] = now_s
        join(self.ledger, hello.ledger)
        if sender in self._members or peer.service == "scheduler" or not 0 <= peer.instance < 256:
            return None, None
        replaced = self.find(peer.service, peer.instance)
        if replaced:
            self.remove(replaced.incarnation)
        self._members[sender] = Member(peer, "starting")
        return peer, replaced

    def heartbeat(self, sender: int, beat: Heartbeat, now_s: float) -> bool:
        """True if the member's state changed. Unknown senders are ignored: they will say Hello."""
        member = self._members.get(sender)
        if member is None or sender == self._own:
            return False
        self._heard_s[sender] = now_s
        state = beat.state
        if member.peer.service == "worker" and state == "ready":
            state = self._judged.get(sender, "starting")
        self._members[sender] = Member(member.peer, state, beat.progress, beat.stage, beat.counters, beat.histograms)
        return state != member.state

    def judge(self, worker: int, state: State) -> bool:
        """What a worker is that calls itself ready: "ready", or "failed" if it is not used. True if that is news."""
        member = self._members.get(worker)
        if member is None or self._judged.get(worker) == state:
            return False
        self._judged[worker] = state
        self._members[worker] = msgspec.structs.replace(member, state=state)
        return True

    def tell_figures(self, worker: int, figures: dict[str, float]) -> None:
        """What the scheduler counts of a worker's group; shown with the worker's own counters."""
        if worker in self._members:
            self._figures[worker] = figures

    def update_own(
        self, state: State, progress: int, counters: dict[str, float], histograms: dict[str, bytes] | None = None
    ) -> None:
        peer = self._members[self._own].peer
        self._members[self._own] = Member(peer, state, progress, None, counters, histograms or {})

    def remove(self, incarnation: int) -> Peer | None:
        """The peer departs, for whatever reason. None if it is no member."""
        if incarnation == self._own:
            return None
        member = self._members.pop(incarnation, None)
        if member is None:
            return None
        retire(self.ledger, member)
        self._heard_s.pop(incarnation, None)
        self._judged.pop(incarnation, None)
        self._figures.pop(incarnation, None)
        self._departed.append(incarnation)
        return member.peer

    def silent(self, now_s: float) -> list[Peer]:
        """Members not heard for `dead_after_s`, or many times that while they start; the caller removes them.

        Nothing is planned on who starts, and one that died in its start is replaced by its successor's Hello.
        Asked again only after long, the scheduler was stopped itself: what came meanwhile is unread, and whoever was
        stopped with it goes on now. All get their time anew.
        """
        if now_s - self._looked_s > self._dead_after_s / 2:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        heard = [(self._members[key], at_s) for key, at_s in self._heard_s.items() if key in self._members]
        return [member.peer for member, at_s in heard if now_s - at_s > self._patience_s(member)]

    def _patience_s(self, member: Member) -> float:
        return self._dead_after_s * (STARTS if member.state == "starting" else 1)

    def members(self) -> list[Member]:
        return [self._shown(incarnation, member) for incarnation, member in self._members.items()]

    def _shown(self, incarnation: int, member: Member) -> Member:
        figures = self._figures.get(incarnation)
        return msgspec.structs.replace(member, counters=member.counters | figures) if figures else member

    def message(self, load: Load, model: ModelFacts | None, schedulers: int = 0) -> Members:
        """To API processes, which serve everybody's figures."""
        return Members(self.members(), list(self._departed), load, model, schedulers, self.ledger)


def without_figures(message: Members) -> Members:
    """To all others."""
    members = [Member(each.peer, each.state, each.progress, each.stage) for each in message.members]
    return msgspec.structs.replace(message, members=members, ledger={})

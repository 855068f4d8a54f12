"""A process's view of the others, made from the `Members` messages of all schedulers. Pure.

Owned by the process that receives the messages; tells what joined and what left since the message before. There is a
`View` per scheduler instance, and their union: a peer is a member while any scheduler that still speaks lists it. So
the loss of one scheduler takes nobody away but itself and its workers.
"""

from collections import deque
from typing import NamedTuple

import msgspec

from common.ledger import Ledger, Standing, join, retire, standings
from common.protocol import Load, Member, Members, ModelFacts, Peer

MISSED_BEATS = 2.5
PREDECESSORS_KEPT = 16
STATES = ("starting", "ready", "draining", "failed")  # a process goes through them in this order
MOST_SCHEDULERS = 64


class Change(NamedTuple):
    joined: list[Peer]
    left: list[Peer]
    new_scheduler: bool  # another process has taken over for this scheduler (or is seen for the first time)
    scheduler: int = 0  # instance of the scheduler that spoke


def by_scheduler(sender: int, message: Members) -> bool:
    """Whether a Members is a scheduler's own: it lists its sender as one. Nobody else may say who is alive."""
    return any(m.peer.incarnation == sender and m.peer.service == "scheduler" for m in message.members)


class View:
    """What one scheduler says. `dead_after_s`: how long a successor of it may take to hear of everybody."""

    def __init__(self) -> None:
        self.scheduler = 0  # incarnation of the one that spoke last
        self.members: dict[int, Member] = {}  # by incarnation
        self.departed: frozenset[int] = frozenset()
        self.load = Load()
        self.model: ModelFacts | None = None
        self.known_model: ModelFacts | None = None  # the last one; a restarted scheduler forgets it for a while
        self.heard_s = self.served_s = float("-inf")  # when it spoke, and when it had a worker
        self.count = 0  # schedulers that there should be; 0: as configured
        self.predecessors: deque[int] = deque(maxlen=PREDECESSORS_KEPT)
        self.places: dict[tuple[str, int], int] = {}  # (service, instance) of those whom it lists itself
        self._grace_end_s = float("-inf")

    @property
    def state(self) -> str:
        """The scheduler's own."""
        own = self.members.get(self.scheduler)
        return own.state if own else "ready"

    def update(self, sender: int, message: Members, now_s: float, own: int, dead_after_s: float) -> None:
        if self.scheduler and sender != self.scheduler:
            self.predecessors.append(self.scheduler)
            self._grace_end_s = now_s + dead_after_s
        known = self.members
        self.members = {member.peer.incarnation: member for member in message.members}
        self.places = {(m.peer.service, m.peer.instance): m.peer.incarnation for m in message.members}
        self.departed = frozenset(message.departed)
        self.load, self.model, self.heard_s = message.load, message.model, now_s
        if message.model is not None:
            self.known_model, self.served_s = message.model, now_s
        self.count = max(0, min(message.schedulers, MOST_SCHEDULERS))
        self.scheduler = sender
        if now_s < self._grace_end_s:
            self._keep(known, own)

    def _keep(self, known: dict[int, Member], own: int) -> None:
        """Members whom a new scheduler has not heard of yet, unless they departed or were replaced."""
        for key, member in known.items():
            place = (member.peer.service, member.peer.instance)
            if key != own and key not in self.departed and place not in self.places:
                self.members[key] = member

    def silent(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether it has missed beats: the next one to speak may be a new one that does not know us."""
        return now_s - self.heard_s > MISSED_BEATS * heartbeat_s


class Membership:
    """`own`: incarnation of the owner. A scheduler that is not heard for `dead_after_s` is lost.

    For as long, a peer that only the predecessor of a new scheduler knew still counts as a member.
    """

    def __init__(self, own: int = 0, dead_after_s: float = 5.0) -> None:
        self._own, self._dead_after_s = own, dead_after_s
        self.views: dict[int, View] = {}  # by the scheduler's instance
        self.members: dict[int, Member] = {}  # by incarnation; of all schedulers that speak
        self.departed: frozenset[int] = frozenset()  # frames of these are dropped
        self.model: ModelFacts | None = None  # what clients see of it is the same at all schedulers that are used
        self.load = Load()  # the sum
        self.scheduler = 0  # incarnation of the scheduler that spoke last
        self.count = 0  # schedulers that there should be; 0: as configured
        self.speaking: dict[int, View] = {}  # those of `views` that are not lost
        self.foreign: frozenset[int] = frozenset()  # instances with another model, which are not used
        self.ledger: Ledger = {}  # of all schedulers, and of those that have gone themselves

    def update(self, sender: int, message: Members, now_s: float) -> Change:
        """Takes the newest message of one scheduler. `now_s` is any monotonic clock."""
        instance = self._instance_of(sender, message)
        if not 0 <= instance < MOST_SCHEDULERS:
            return Change([], [], False, instance)  # no scheduler of ours
        view = self.views.get(instance)
        if view is None:
            view = self.views[instance] = View()
        if sender in view.predecessors:
            return Change([], [], False, instance)  # late word of one that has been replaced
        changed, before = sender != view.scheduler, view.members
        view.update(sender, message, now_s, self._own, self._dead_after_s)
        join(self.ledger, message.ledger)
        for key in before.keys() - view.members.keys():
            retire(self.ledger, before[key])
        self.scheduler, known = sender, self.members
        self._unite([each for each in self.views.values() if now_s - each.heard_s <= self._dead_after_s])
        return Change(
            joined=[member.peer for key, member in self.members.items() if key not in known],
            left=[member.peer for key, member in known.items() if key not in self.members],
            new_scheduler=changed,
            scheduler=instance,
        )

    def standings(self) -> list[Standing]:
        """What all places have counted, also those of schedulers that are not heard now."""
        members = {key: member for view in self.views.values() for key, member in view.members.items()}
        places = {(each.peer.service, each.peer.instance) for each in self.members.values()}
        others = [each for each in members.values() if (each.peer.service, each.peer.instance) not in places]
        return list(standings(self.ledger, [*self.members.values(), *others]))

    def _instance_of(self, sender: int, message: Members) -> int:
        """A scheduler lists itself; one that does not is taken for the first."""
        for member in message.members:
            if member.peer.incarnation == sender:
                return member.peer.instance
        return self.instance_of(sender) or 0

    def _unite(self, speaking: list[View]) -> None:
        members: dict[int, Member] = {}
        for view in speaking:
            for key, member in view.members.items():
                other = members.get(key)
                if other is None or _newer(member, other):
                    members[key] = member
        for view in speaking:
            for key in view.departed & members.keys():
                place = (members[key].peer.service, members[key].peer.instance)
                if place in view.places:  # replaced; otherwise only this scheduler has lost it
                    del members[key]
        self.members = members
        self.departed = frozenset().union(*(view.departed for view in self.views.values())) - members.keys()
        self.count = max(view.count for view in speaking)
        self.load = _sum_of([view.load for view in speaking])
        self.speaking = {instance: view for instance, view in sorted(self.views.items()) if view in speaking}
        self._agree()

    def _agree(self) -> None:
        """The system's model is that of the first scheduler that has one, also while its workers are away."""
        reference = next((view.known_model for view in self.speaking.values() if view.known_model), None)
        models, foreign = [], []
        for instance, view in self.speaking.items():
            if view.model is None or reference is None:
                continue
            if same_model(view.model, reference):
                models.append(view.model)
            else:
                foreign.append(instance)
        self.foreign, self.model = frozenset(foreign), None
        if models:
            longest = min(model.max_model_len for model in models)
            self.model = msgspec.structs.replace(models[0], max_model_len=longest)

    def instance_of(self, scheduler: int) -> int | None:
        """Instance of the scheduler that has this incarnation now."""
        return next((instance for instance, view in self.views.items() if view.scheduler == scheduler), None)

    @property
    def heard_s(self) -> float:
        """When any scheduler spoke."""
        return max((view.heard_s for view in self.views.values()), default=float("-inf"))

    def silent(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether all schedulers have missed beats."""
        return all(view.silent(now_s, heartbeat_s) for view in self.views.values())

    def lost(self, instance: int, now_s: float) -> bool:
        """Whether a scheduler has not been heard for `dead_after_s`, or never."""
        view = self.views.get(instance)
        return view is None or now_s - view.heard_s > self._dead_after_s

    def starved(self, instance: int, now_s: float) -> bool:
        """Whether a scheduler has had no worker for `dead_after_s`."""
        view = self.views.get(instance)
        return view is None or (view.model is None and now_s - view.served_s > self._dead_after_s)

    def lists_us(self, instance: int) -> bool:
        """Whether that scheduler counts us as a member."""
        view = self.views.get(instance)
        return view is not None and self._own in view.members

    def takes_work(self, instance: int, now_s: float, heartbeat_s: float) -> bool:
        """Whether a scheduler speaks, is ready, knows us, and has workers with this system's model."""
        view = self.views.get(instance)
        return (
            view is not None
            and not view.silent(now_s, heartbeat_s)
            and view.state == "ready"
            and self._own in view.members
            and view.model is not None
            and instance not in self.foreign
        )

    def ready(self, service: str) -> list[Peer]:
        """Peers of a service that take new work, lowest instance first."""
        found = [m.peer for m in self.members.values() if m.peer.service == service and m.state == "ready"]
        return sorted(found, key=lambda peer: peer.instance)


def same_model(first: ModelFacts, second: ModelFacts) -> bool:
    """Whether clients and tokenizers see the same model in both; its longest context may differ."""
    return (first.name, first.vocab_size, first.eos_token_ids) == (second.name, second.vocab_size, second.eos_token_ids)


def _newer(member: Member, other: Member) -> bool:
    """Whether the first entry of the same process was made later, as far as can be told."""
    return (STATES.index(member.state), member.progress) >= (STATES.index(other.state), other.progress)


def _sum_of(loads: list[Load]) -> Load:
    if len(loads) == 1:
        return loads[0]
    total = {name: sum(getattr(load, name) for load in loads) for name in Load.__struct_fields__}
    return Load(**total | {"wait_s": min((load.wait_s for load in loads), default=0.0)})

"""What all worker groups of one scheduler share: ended sequences, counts, and what tokenizers must hear, in order.

Written by the groups' states and cores, which the fleet calls one at a time. A sequence may move from group to group,
so its tokens are in order only if all groups' effects are in one list.
"""

from collections import Counter

from services.scheduler.events import Effect
from services.scheduler.kv_events import KvLog
from services.scheduler.outbox import Outbox
from services.scheduler.past import Past


class Book:
    def __init__(self) -> None:
        self.past = Past()
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self.effects: list[Effect] = []
        self.kv_log: KvLog | None = None  # if somebody wants to hear of the prefix caches

    def drain(self) -> list[Effect]:
        """All effects since the call before, but for plans."""
        effects = [*self.effects, *self.outbox.drain()]
        self.effects.clear()
        return effects

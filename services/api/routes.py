"""Which tokenizer gets what: open work per tokenizer, and the ids that say where answers come from. Pure.

Owned by the hub. Ids of one API process count up, also when a choice moves: the scheduler takes the newest for valid.
"""

from collections import Counter

from common.errors import Reject, RejectReason
from common.protocol import Peer, make_seq_id


class Routes:
    def __init__(self, instance: int, incarnation: int) -> None:
        self.work: Counter[int] = Counter()  # open choices and calls by tokenizer incarnation
        self._given: Counter[int] = Counter()  # everything ever sent, breaks ties between idle tokenizers
        self._instance, self._salt = instance, incarnation
        self._counter = 0

    def pick(self, tokenizers: list[Peer]) -> Peer:
        """The one with the least open work. Raises Reject if there is none."""
        if not tokenizers:
            raise Reject(RejectReason.UNAVAILABLE, "no tokenizer is ready")
        return min(tokenizers, key=lambda peer: (self.work[peer.incarnation], self._given[peer.incarnation]))

    def take_ids(self, peer: Peer, count: int) -> int:
        """The first of `count` consecutive ids."""
        if self._counter + count > 1 << 32:
            self._counter = 0
        first = make_seq_id(self._instance, peer.instance, self._salt, self._counter)
        self._counter += count
        return first

    def add(self, tokenizer: int, count: int = 1) -> None:
        self.work[tokenizer] += count
        self._given[tokenizer] += count

    def release(self, tokenizer: int) -> None:
        self.work[tokenizer] -= 1

    def forget(self, tokenizer: int) -> None:
        """It has left."""
        self.work.pop(tokenizer, None)
        self._given.pop(tokenizer, None)

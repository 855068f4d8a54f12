"""The queue of sequences that hold nothing yet, most urgent first, first come first served within a priority.

Owned by the core's state. A preempted sequence keeps its order of arrival and so comes back to the front.
"""

from bisect import bisect_left, insort

from services.scheduler.policy import Key
from services.scheduler.request import Sequence


class WaitingQueue:
    """Sorted by key. Insertion and removal at any place; the cost is one memory move of the key list."""

    def __init__(self) -> None:
        self.arrivals = 0  # sequences that have come, which gives the next one its place
        self.tokens = 0  # known tokens of those that wait
        self._keys: list[Key] = []
        self._by_key: dict[Key, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, sequence: Sequence) -> None:
        insort(self._keys, sequence.key)
        self._by_key[sequence.key] = sequence
        self.tokens += sequence.known

    def at(self, idx: int) -> Sequence:
        return self._by_key[self._keys[idx]]

    def pop(self, idx: int) -> Sequence:
        sequence = self._by_key.pop(self._keys.pop(idx))
        self.tokens -= sequence.known
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not in the queue."""
        del self._by_key[sequence.key]
        del self._keys[bisect_left(self._keys, sequence.key)]
        self.tokens -= sequence.known

    def check(self, expected: set[int]) -> None:
        """Asserts order, and that exactly the sequences with these ids wait."""
        assert self._keys == sorted(self._by_key), "the queue's keys are out of order"
        assert self.tokens == sum(sequence.known for sequence in self._by_key.values()), "the queue's tokens are wrong"
        assert {sequence.seq_id for sequence in self._by_key.values()} == expected, "the queue differs from WAITING"

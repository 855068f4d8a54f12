"""The queue of sequences that hold nothing yet. Owned by the core's state.

Between tenants the one that was served least goes first (tenants.py); within a tenant the smallest key: priority and
order of arrival, where waiting counts as urgency (policy.py). A preempted sequence keeps its key and so comes back to
the front. The queue's own time is that of the tenant taken last, when it was taken (as in start-time fair queueing,
Goyal et al., SIGCOMM 1996): a tenant that waits again at once keeps its place, one that was away gets no credit.
A tenant's time only grows, so an old one in the heap is a lower bound, brought up to date when it comes to the top.
Costs: the logarithm of the tenants, and one memory move of a tenant's key list.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush, heapreplace

from services.scheduler.policy import Key
from services.scheduler.request import Sequence
from services.scheduler.tenants import Tenant, Tenants


class WaitingQueue:
    """`tick` gives the present decode tick, which tells what tenants have been served."""

    def __init__(self, tick: Callable[[], int]) -> None:
        self.arrivals = 0  # sequences that have come, which gives the next one its place
        self.tokens = 0  # the sum of what sequences weigh in the queue
        self.drained = 0  # and of all that have left it
        self.tenants = Tenants(tick)
        self._tick = tick
        self._by_key: dict[Key, Sequence] = {}
        self._heap: list[tuple[float, int, Tenant]] = []  # tenants that wait, and perhaps some that do not any more
        self._now = 0.0  # the queue's time
        self._last: Tenant | None = None  # who waited last, while nobody does
        self._held: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if not tenant.keys:
            self._lift(tenant)
        self.tokens += sequence.load
        self._insert(sequence)

    def first(self) -> Sequence | None:
        """Who is next; None if nobody waits."""
        tenant = self._top()
        return None if tenant is None else self._by_key[tenant.keys[0]]

    def take(self, sequence: Sequence) -> None:
        """It is served now."""
        self._now = max(self._now, sequence.tenant.virtual(self._tick()))
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not in the queue."""
        self._extract(sequence)
        self.tokens -= sequence.load
        self.drained += sequence.load
        if not sequence.tenant.keys:
            self._last = sequence.tenant

    def hold(self, sequence: Sequence) -> None:
        """Passes it over until `release`."""
        self._extract(sequence)
        self._held.append(sequence)

    def release(self) -> None:
        """Who was passed over waits as before."""
        for sequence in self._held:
            self._insert(sequence)
        self._held.clear()

    def _lift(self, tenant: Tenant) -> None:
        """Before a tenant begins to wait: it gets no credit for the time in which it did not."""
        tick = self._tick()
        if self._last is not None and self._top() is None:
            self._now = max(self._now, self._last.virtual(tick))  # it went on while nobody waited
        tenant.lift(tick, self._now)

    def _top(self) -> Tenant | None:
        """The tenant that was served least of those that wait."""
        heap = self._heap
        while heap:
            virtual, _, tenant = heap[0]
            if not tenant.keys:
                heappop(heap)
                tenant.listed = False
                continue
            now = tenant.virtual(self._tick())
            if now <= virtual:
                return tenant
            heapreplace(heap, (now, tenant.number, tenant))
        return None

    def _insert(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        insort(tenant.keys, sequence.key)
        self._by_key[sequence.key] = sequence
        if not tenant.listed:
            tenant.listed = True
            heappush(self._heap, (tenant.virtual(self._tick()), tenant.number, tenant))

    def _extract(self, sequence: Sequence) -> None:
        del self._by_key[sequence.key]
        keys = sequence.tenant.keys
        del keys[bisect_left(keys, sequence.key)]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that exactly these wait, each in the list of its tenant, and that the heap has lower bounds."""
        expected = list(sequences)
        assert set(self._by_key.values()) == set(expected), "the queue differs from WAITING"
        assert all(self._by_key[sequence.key] is sequence for sequence in expected), "a key is another's"
        assert self.tokens == sum(sequence.load for sequence in expected), "the queue's tokens are wrong"
        assert not self._held, "somebody is still passed over"
        listed = [tenant for _, _, tenant in self._heap]
        assert len(set(listed)) == len(listed) and all(tenant.listed for tenant in listed), "the heap repeats a tenant"
        assert {sequence.tenant for sequence in expected} <= set(listed), "a waiting tenant is not in the heap"
        tick = self._tick()
        assert all(virtual <= tenant.virtual(tick) for virtual, _, tenant in self._heap), "a time has gone back"

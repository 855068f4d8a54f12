"""The queue: between tenants by what they were served, within one by priority and arrival."""

from fractions import Fraction
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol import Sampling
from services.scheduler.policy import Key
from services.scheduler.request import Request, Sequence
from services.scheduler.waiting import WaitingQueue


class Rig:
    """A queue, the tick it sees, and sequences of any tenant."""

    def __init__(self) -> None:
        self.tick = 0
        self.queue = WaitingQueue(lambda: self.tick)
        self.waiting: list[Sequence] = []
        self.arrivals = count()

    def sequence(self, key: Key, tenant: str = "", weight: int = 1, load: int = 1) -> Sequence:
        request = Request(b"\1\0\0\0", 1, b"")
        owner = self.queue.tenants.open(tenant, weight)
        return Sequence(key[1], request, Sampling(max_tokens=1), key, 2, bytearray(request.prompt), owner, load)

    def add(self, key: Key, tenant: str = "", weight: int = 1, load: int = 1) -> Sequence:
        sequence = self.sequence(key, tenant, weight, load)
        self.queue.add(sequence)
        self.waiting.append(sequence)
        return sequence

    def arrive(self, tenant: str, weight: int = 1, load: int = 1) -> Sequence:
        return self.add((0, next(self.arrivals)), tenant, weight, load)

    def take(self) -> Sequence:
        """The next one leaves."""
        sequence = self.queue.first()
        assert sequence is not None
        self.queue.take(sequence)
        self.waiting.remove(sequence)
        self.queue.check(self.waiting)
        return sequence


def rig(*keys: Key) -> Rig:
    rig = Rig()
    for key in keys:
        rig.add(key)
    return rig


def test_order_within_and_between_priorities() -> None:
    waiting = rig((1, 0), (0, 1), (0, 2), (-1, 3))
    assert [waiting.take().key for _ in range(4)] == [(-1, 3), (0, 1), (0, 2), (1, 0)]
    assert len(waiting.queue) == 0 and waiting.queue.first() is None


def test_a_preempted_sequence_comes_back_to_the_front_of_its_priority() -> None:
    waiting = rig((0, 5), (0, 6), (-1, 9), (0, 2))
    assert [waiting.take().key for _ in range(3)] == [(-1, 9), (0, 2), (0, 5)]


def test_removal_from_the_middle() -> None:
    waiting = rig((0, 0), (0, 1), (0, 2))
    gone = waiting.waiting.pop(1)
    waiting.queue.remove(gone)
    waiting.queue.check(waiting.waiting)
    with pytest.raises(KeyError):
        waiting.queue.remove(gone)
    assert [waiting.take().key for _ in range(2)] == [(0, 0), (0, 2)]


def test_check_finds_a_stranger() -> None:
    with pytest.raises(AssertionError, match="differs from WAITING"):
        rig((0, 0)).queue.check([])


def test_tokens_are_those_of_who_waits() -> None:
    waiting = Rig()
    waiting.arrive("a", load=10)
    waiting.arrive("b", load=5)
    assert (waiting.queue.tokens, waiting.queue.drained) == (15, 0)
    waiting.take()
    assert (waiting.queue.tokens, waiting.queue.drained) == (5, 10)


def test_who_is_held_is_passed_over_and_keeps_its_place() -> None:
    waiting = rig((0, 0), (0, 1), (0, 2))
    first = waiting.queue.first()
    assert first is not None
    waiting.queue.hold(first)
    second = waiting.queue.first()
    assert second is not None and second.key == (0, 1)
    waiting.queue.hold(second)
    third = waiting.queue.first()
    assert third is not None and third.key == (0, 2)
    waiting.queue.release()
    assert [waiting.take().key for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]


@given(st.lists(st.integers(-2, 2)))
def test_any_arrivals_leave_in_order(priorities: list[int]) -> None:
    keys: list[Key] = [(priority, order) for order, priority in enumerate(priorities)]
    waiting = rig(*keys)
    assert [waiting.take().key for _ in keys] == sorted(keys)


def test_tenants_that_were_served_alike_take_turns_and_a_flood_does_not_help() -> None:
    waiting = Rig()
    for _ in range(6):
        waiting.arrive("flood")
    waiting.arrive("small")
    waiting.arrive("small")
    order = []
    for _ in range(6):
        taken = waiting.take()
        taken.tenant.charge(100)
        order.append(taken.tenant.name)
    assert order == ["flood", "small", "flood", "small", "flood", "flood"]


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    waiting = Rig()
    busy = waiting.arrive("busy").tenant
    for _ in range(2):
        waiting.arrive("busy")
        waiting.take()
        busy.charge(10_000)
    late = waiting.arrive("late").tenant
    assert late.virtual(0) == 10_000  # a turn behind the one that was taken last, and not two
    while waiting.queue.first():
        waiting.take()
    busy.charge(30_000)
    later = waiting.arrive("later").tenant
    assert later.virtual(0) == 50_000  # nobody waits: as much as who waited last has by now


def test_a_tenant_that_comes_back_at_once_keeps_its_place() -> None:
    """One request at a time is not an idle tenant: cheap ones are not made to pay for a neighbour's dear ones."""
    waiting = Rig()
    waiting.arrive("dear").tenant.charge(1000)
    cheap = waiting.arrive("cheap").tenant
    for _ in range(50):
        assert waiting.take().tenant is cheap
        cheap.charge(10)
        waiting.arrive("cheap")
    assert cheap.virtual(0) == 500


def test_rows_that_step_are_charged_by_the_tick_without_being_touched() -> None:
    waiting = Rig()
    one, two = waiting.arrive("a").tenant, waiting.arrive("b").tenant
    one.step(waiting.tick, 3)
    waiting.tick += 5
    assert (one.virtual(waiting.tick), two.virtual(waiting.tick)) == (15, 0)
    assert waiting.take().tenant is two
    one.step(waiting.tick, -2)
    waiting.tick += 5
    one.weigh(waiting.tick, 10)
    waiting.tick += 10
    assert one.virtual(waiting.tick) == 15 + 5 + 1


COST = 50  # the most that one turn may cost


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=5),
    st.lists(st.integers(1, COST), min_size=400, max_size=400),
    st.integers(0, 4),
)
def test_tenants_that_always_wait_get_what_their_weights_say(weights: list[int], costs: list[int], late: int) -> None:
    """The bound of the paper: what two backlogged tenants got differs, per weight, by at most one turn each."""
    waiting = Rig()
    names = [f"t{number}" for number in range(len(weights))]
    served = dict.fromkeys(names, 0)
    since = dict.fromkeys(names, Fraction(0))
    late %= len(names)
    for turn, cost in enumerate(costs):
        for number, name in enumerate(names):
            if not any(sequence.tenant.name == name for sequence in waiting.waiting) and (number != late or turn > 99):
                if number == late and turn == 100:  # it joins late, and is due nothing for the time before
                    since = {other: Fraction(served[other], weights[at]) for at, other in enumerate(names)}
                waiting.arrive(name, weights[number])
        taken = waiting.take()
        taken.tenant.charge(cost)
        served[taken.tenant.name] += cost
        waiting.queue.tenants.close(taken.tenant)
    shares = [Fraction(served[name], weight) - since[name] for name, weight in zip(names, weights, strict=True)]
    slack = 2 * Fraction(COST, min(weights))
    assert max(shares) - min(shares) <= 2 * slack


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3), st.integers(1, 20)), min_size=1, max_size=60))
def test_nobody_waits_for_ever(arrivals: list[tuple[int, int, int]]) -> None:
    """Whatever comes and costs, the queue serves each tenant's own order, and empties."""
    waiting = Rig()
    for number, (tenant, priority, cost) in enumerate(arrivals):
        waiting.add((priority, number), f"t{tenant}", weight=cost)
        waiting.tick += 1
        if number % 3 == 2:
            taken = waiting.take()
            taken.tenant.charge(cost)
            same = [other.key for other in waiting.waiting if other.tenant is taken.tenant]
            assert not same or taken.key < min(same)
    for _ in range(len(waiting.waiting)):
        waiting.take()
    assert waiting.queue.first() is None and waiting.queue.tokens == 0

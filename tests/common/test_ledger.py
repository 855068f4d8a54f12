import itertools
import random

from common.buckets import Buckets, unpack
from common.ledger import Ledger, Standing, join, retire, standings
from common.metrics import METRICS
from common.protocol import Member, Peer, Tally

GAPS = "inter_token_latency_seconds|0"


def member(instance: int, incarnation: int, requests: float, gaps: int = 0) -> Member:
    buckets = Buckets(METRICS["inter_token_latency_seconds"].bounds)
    buckets.add(0.02, gaps)
    counters = {"requests": requests, "open_requests": 3.0}
    return Member(Peer("api", instance, incarnation, ""), "ready", 0, None, counters, {GAPS: buckets.pack()})


def requests(found: list[Standing]) -> dict[int, float]:
    return {each.instance: each.counters["requests"] for each in found}


def gaps(standing: Standing) -> float:
    return sum(unpack(standing.histograms[GAPS], len(METRICS["inter_token_latency_seconds"].bounds) + 2)[:-1])


def test_a_successor_goes_on_where_its_predecessor_ended() -> None:
    ledger: Ledger = {}
    retire(ledger, member(0, 1, 5, gaps=2))
    retire(ledger, member(0, 1, 5, gaps=2))  # heard of twice
    (found,) = standings(ledger, [member(0, 2, 7, gaps=3)])
    assert (found.counters["requests"], gaps(found), found.live) == (12, 5, True)
    assert found.counters["open_requests"] == 3  # a gauge is not added


def test_who_is_gone_is_counted_once_and_has_no_gauges() -> None:
    ledger: Ledger = {}
    retire(ledger, member(1, 4, 5))
    (found,) = standings(ledger, [member(1, 4, 5)])  # another scheduler has not noticed yet
    assert not found.live and found.counters == {"requests": 5.0}
    assert not Ledger() and list(standings({}, [])) == []


def test_joining_is_idempotent_and_in_any_order_the_same() -> None:
    parts: list[Ledger] = [{}, {}, {}]
    for part, (instance, incarnation) in zip(itertools.cycle(parts), itertools.product(range(2), range(3))):
        for other in parts[: 1 + incarnation]:
            retire(other, member(instance, 10 * instance + incarnation, 1 + incarnation))
        join(part, parts[0])
    found = []
    for order in itertools.permutations(parts):
        whole: Ledger = {}
        for part in (*order, *order):
            join(whole, part)
        found.append({key: (set(tally.gone), tally.counters) for key, tally in whole.items()})
    assert all(each == found[0] for each in found) and len(found[0]) == 2


def test_sums_never_fall_whoever_restarts() -> None:
    """Random deaths of processes and of the scheduler that keeps the ledger; a reader looks after every event."""
    draw = random.Random(3)
    live = {instance: (instance, 0.0) for instance in range(3)}  # incarnation, requests
    scheduler: Ledger = {}
    reader: Ledger = {}
    told, counted = 0.0, 0.0
    for event in range(400):
        instance = draw.randrange(3)
        incarnation, own = live[instance]
        if draw.random() < 0.6:
            live[instance] = incarnation, own + 1
            counted += 1
        elif draw.random() < 0.7:
            retire(scheduler, member(instance, incarnation, own))
            live[instance] = 100 + event, 0.0
        else:
            scheduler = {}
            join(scheduler, reader)  # by the Hello of who has heard the predecessor
        join(reader, scheduler)
        now = [member(each, key, value) for each, (key, value) in live.items()]
        total = sum(requests(list(standings(reader, now))).values())
        assert told <= total == counted
        told = total


def test_nonsense_of_peers_is_left_out() -> None:
    ledger: Ledger = {}
    join(ledger, {"api-x": Tally((), {"requests": 1.0}, {}), "api-1": Tally((), {"nothing": 1.0}, {GAPS: b"short"})})
    join(ledger, {"api-1": Tally((), {"requests": 2.0}, {"nothing": b"", GAPS: b""})})
    assert requests(list(standings(ledger, []))) == {1: 2.0}
    join(ledger, {f"api-{number}": Tally((), {}, {}) for number in range(5000)})
    assert len(ledger) <= 1024

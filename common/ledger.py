"""What processes had counted that are gone, so that sums over processes never fall when one of them ends. Pure.

A scheduler keeps a ledger of all places (service and instance) and tells it to the APIs; each of them keeps what it
has heard, and hands it to a scheduler that starts afresh. Ledgers join by the greater value, so hearing one twice
changes nothing, and an incarnation counts either by its own heartbeats or, once it is listed as gone, by the ledger.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from common import metrics
from common.buckets import pack, unpack
from common.protocol import Member, Peer, Tally

Ledger = dict[str, Tally]
Joining = Callable[[float, float], float]
GONE_KEPT = 8  # incarnations of a place; of older ones nobody has late figures
MOST_PLACES = 4 * 256


class Standing(NamedTuple):
    """What one place has counted, by all processes that ever were there; `live`: one is."""

    service: str
    instance: int
    live: bool
    counters: dict[str, float]
    histograms: dict[str, bytes]


def place(peer: Peer) -> str:
    return f"{peer.service}-{peer.instance}"


def retire(ledger: Ledger, member: Member) -> None:
    """The process has departed; its figures stay. Fine if that is known, or if it has told nothing."""
    key, incarnation = place(member.peer), member.peer.incarnation
    known = ledger.get(key, Tally((), {}, {}))
    if incarnation in known.gone or not member.counters or (key not in ledger and len(ledger) >= MOST_PLACES):
        return
    counters = {name: value for name, value in member.counters.items() if _is_counter(name)}
    ledger[key] = Tally(
        (*known.gone, incarnation)[-GONE_KEPT:],
        added(known.counters, counters),
        _joined(known.histograms, member.histograms, float.__add__),
    )


def join(ledger: Ledger, other: Ledger) -> None:
    """Takes what `other` knows besides."""
    for key, theirs in other.items():
        mine = ledger.get(key)
        if mine is None:
            if len(ledger) < MOST_PLACES:
                ledger[key] = theirs
        elif mine != theirs:
            gone = tuple(dict.fromkeys((*mine.gone, *theirs.gone)))[-GONE_KEPT:]
            counters = {name: max(mine.counters.get(name, 0.0), value) for name, value in theirs.counters.items()}
            histograms = _joined(mine.histograms, theirs.histograms, max)
            ledger[key] = Tally(gone, mine.counters | counters, histograms)


def standings(ledger: Ledger, members: Iterable[Member]) -> Iterator[Standing]:
    """Of every place that has or had a process; gauges only of those that live."""
    seen = set()
    for member in members:
        key, peer = place(member.peer), member.peer
        seen.add(key)
        known = ledger.get(key)
        if known is None:
            yield Standing(peer.service, peer.instance, True, member.counters, member.histograms)
        elif peer.incarnation in known.gone:
            seen.discard(key)
        else:
            counters = member.counters | added(
                known.counters, {name: value for name, value in member.counters.items() if _is_counter(name)}
            )
            histograms = _joined(known.histograms, member.histograms, float.__add__)
            yield Standing(peer.service, peer.instance, True, counters, histograms)
    for key in ledger.keys() - seen:
        service, _, instance = key.rpartition("-")
        if instance.isdecimal():
            yield Standing(service, int(instance), False, ledger[key].counters, ledger[key].histograms)


def added(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return first | {name: first.get(name, 0.0) + value for name, value in second.items()}


def _is_counter(key: str) -> bool:
    found = metrics.parsed(key)
    return found is not None and metrics.METRICS[found[0]].kind == "counter"


def _joined(first: dict[str, bytes], second: dict[str, bytes], how: Joining) -> dict[str, bytes]:
    result = dict(first)
    for name, column in second.items():
        found = metrics.parsed(name)
        if found is None:
            continue
        size = len(metrics.METRICS[found[0]].bounds) + 2
        both = zip(unpack(result.get(name, b""), size), unpack(column, size), strict=True)
        result[name] = pack([how(mine, theirs) for mine, theirs in both])
    return result

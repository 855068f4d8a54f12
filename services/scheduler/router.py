"""Which worker group a sequence goes to. Pure functions of plain numbers; the fleet asks them.

A group costs the tokens that it must compute before the sequence has ended there (policy after the idea of SGLang's
and Dynamo's routers, prefix against load, in one unit):

    cost = uncached + pending + output * open + missing

uncached: known tokens of the sequence without KV there; pending: known tokens of others there that no plan computes
yet; output: tokens that the sequence may still give, at most EXPECTED_OUTPUT, in each of which every open sequence
takes part; missing: tokens of KV that others must give up first. A prefix saves at most its own length, so a group is
never chosen whose load exceeds the least loaded one's by more than the cached tokens.
"""

from collections.abc import Iterable
from typing import NamedTuple

EXPECTED_OUTPUT = 128  # tokens; max_tokens is often just the largest that is allowed
MOST_MOVES = 32  # sequences that one group takes from the queues of others at once


class Place(NamedTuple):
    """One group as a sequence sees it."""

    uncached: int
    pending: int
    open: int  # sequences, running and waiting
    missing: int = 0
    full: bool = False  # its queue takes no more requests
    short: int = 0  # tokens, of those that the sequence will probably have, for which the group is too small


def expected_output(max_tokens: int, num_output: int) -> int:
    return min(max(max_tokens - num_output, 1), EXPECTED_OUTPUT)


def cost(place: Place, output: int) -> int:
    """In tokens to compute."""
    return place.uncached + place.pending + output * place.open + place.missing


def choose(places: Iterable[Place], output: int) -> int:
    """The best group's index: one that can hold the sequence to its end, has room in its queue, and costs least.

    The first of equals. With none that meets the first two, one that comes near.
    """
    ranks = [(place.short, place.full, cost(place, output), idx) for idx, place in enumerate(places)]
    return min(ranks)[3]


def should_move(here: Place, there: Place, output: int) -> bool:
    """Whether a sequence that waits `here`, as its next one, ends sooner in a group that has nobody waiting."""
    return there.short <= here.short and cost(there, output) < cost(here, output)

"""Moves sequences without rows between worker groups. Called by the fleet.

Invariant: before and after a call each sequence is in exactly one group.
"""

from heapq import nsmallest

from common.protocol import FinishReason
from services.scheduler import places, router
from services.scheduler.core import SchedulerCore
from services.scheduler.policy import Key, length_limit
from services.scheduler.request import Sequence, Stage
from services.scheduler.state import State


def _by_key(sequence: Sequence) -> Key:
    return sequence.key


def empty(source: SchedulerCore, cores: list[SchedulerCore], now_s: float) -> None:
    """All sequences of a group that has gone go to the best of the others, the most urgent first."""
    for sequence in sorted(source.state.sequences.values(), key=_by_key):
        output = router.expected_output(sequence.sampling.max_tokens, sequence.num_output)
        best = router.choose([places.of_sequence(core.state, sequence) for core in cores], output)
        move(source, cores[best], sequence, now_s)


def balance(cores: list[SchedulerCore], now_s: float) -> None:
    """Groups with nothing to begin with take sequences that others have passed over, as many as they have rows for."""
    for taker in cores:
        donors = [core for core in cores if core is not taker and core.left_over]
        room = min(places.room(taker.state), router.MOST_MOVES) if donors else 0
        for donor in sorted(donors, key=lambda core: -core.left_over):
            if room:
                room -= _take(donor, taker, min(room, donor.left_over), now_s)


def _take(donor: SchedulerCore, taker: SchedulerCore, most: int, now_s: float) -> int:
    """Moves sequences, the most urgent first, as long as they gain by it. Returns how many."""
    waiting = (sequence for sequence in donor.state.sequences.values() if sequence.stage is Stage.WAITING)
    moved = 0
    for sequence in nsmallest(most, waiting, key=_by_key):
        output = router.expected_output(sequence.sampling.max_tokens, sequence.num_output)
        here = places.of_next(donor.state, sequence)
        if not router.should_move(here, places.of_sequence(taker.state, sequence), output):
            break
        move(donor, taker, sequence, now_s)
        moved += 1
    donor.left_over -= moved
    return moved


def move(source: SchedulerCore, target: SchedulerCore, sequence: Sequence, now_s: float) -> None:
    """From any core to one that has a worker."""
    _part(source.state, sequence)
    target.state.now_s = now_s
    _adopt(target.state, sequence)
    target.changed = True
    target.state.counters["moved"] += 1


def _part(state: State, sequence: Sequence) -> None:
    assert sequence.row is None, "a sequence that moves has no row"
    if sequence.stage is Stage.WAITING:
        state.waiting.remove(sequence)
    del state.sequences[sequence.seq_id]
    if state.worker is not None:
        state.worker.stops.remove(sequence.sampling)


def _adopt(state: State, sequence: Sequence) -> None:
    """It ends if it is too long for this group: whoever moves it has looked for one in which it is not."""
    worker = state.worker
    assert worker is not None and state.ready
    sequence.note(state.now_s, "moved to another worker group")
    state.sequences[sequence.seq_id] = sequence
    worker.stops.add(sequence.sampling)
    if sequence.stage is Stage.WAITING:
        state.waiting.add(sequence)
    sequence.limit = length_limit(sequence.request.num_prompt, sequence.sampling.max_tokens, worker.longest)
    if sequence.known >= sequence.limit:
        message = f"its {sequence.known} tokens fit no worker group any more; the largest takes {worker.longest}"
        state.finish(sequence, FinishReason.ERROR, message=message)

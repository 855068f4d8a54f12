from common.buckets import unpack
from common.metrics import METRICS
from common.protocol import Abort
from services.scheduler.events import Tick
from tests.services.scheduler.harness import Harness, ids


def found(harness: Harness) -> dict[str, tuple[float, float]]:
    """Number and sum of each figure's values."""
    result = {}
    for name, column in harness.core.state.past.figures.packed().items():
        *counts, total = unpack(column, len(METRICS[name].bounds) + 2)
        result[name] = sum(counts), total
    return result


def test_the_times_of_a_sequence() -> None:
    harness = Harness()
    harness.admit(ids(6), max_tokens=3)  # second 1
    harness.ready()  # second 2: planned
    harness.run()  # a token with each second from 3 on
    figures = found(harness)
    assert figures["queue_seconds"] == (1, 1.0)
    assert figures["prefill_seconds"] == (1, 1.0) and figures["prefill_seconds_per_token"] == (1, 1 / 6)
    assert figures["decode_seconds"] == (1, 2.0) and figures["inference_seconds"] == (1, 3.0)
    assert figures["sequence_computed_tokens"] == (1, 6.0) and figures["sequence_preemptions"] == (1, 0.0)
    assert figures["step_tokens"] == (3, 8.0)


def test_what_the_prefix_cache_had_is_not_computed() -> None:
    harness = Harness.with_worker()
    for _ in range(2):
        harness.admit(ids(9), max_tokens=1)
        harness.run()
    assert found(harness)["sequence_computed_tokens"] == (2, 9.0 + 1.0)
    counters = harness.core.metrics()
    assert (counters["computed_tokens"], counters["cached_tokens"]) == (10, 8)


def test_who_never_ran_has_no_times_and_who_made_no_token_no_prefill() -> None:
    harness = Harness()
    first = harness.admit(ids(4))
    harness.send(Abort(first))
    assert all(count == 0 for count, _ in found(harness).values())
    harness.ready()
    second = harness.admit(ids(4))
    harness.send(Abort(second))
    figures = found(harness)
    assert figures["queue_seconds"][0] == 1 and figures["prefill_seconds"][0] == 0


def test_a_preemption_begins_no_time_anew() -> None:
    harness = Harness.with_worker()
    sequence = harness.core.state.sequences[harness.admit(ids(7), max_tokens=6)]
    harness.answer()
    assert sequence.row
    harness.core.state.preempt(sequence.row, "for this test")
    harness.send(Tick())
    harness.run()
    figures = found(harness)
    assert figures["sequence_preemptions"] == (1, 1.0) and figures["queue_seconds"] == (1, 0.0)
    assert figures["decode_seconds"][1] + figures["prefill_seconds"][1] == figures["inference_seconds"][1] > 6


def test_a_full_queue_says_of_what() -> None:
    harness = Harness(max_waiting=2, max_waiting_tokens=8)
    harness.ready()
    harness.core.state.ready = False  # nothing is planned
    harness.admit(ids(6), n=1)
    harness.admit(ids(6))
    assert harness.core.metrics()["queue_full|max_num_queued_tokens"] == 1
    harness.admit(ids(2))
    harness.admit(ids(2))
    assert harness.core.metrics()["queue_full|max_num_queued_reqs"] == 1

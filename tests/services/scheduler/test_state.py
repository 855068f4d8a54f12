"""The worker comes and goes; moves of sequences."""

import msgspec
import pytest

from common.protocol import Abort, FinishReason, StepResult, WorkerReady
from services.scheduler.events import WorkerLost
from tests.services.scheduler.harness import PLAIN, Harness, ids


def test_rows_survive_the_loss_of_their_worker() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    core.answer(60)
    core.answer(61)
    late = core.plans.pop(0)
    core.plans.clear()
    core.send(WorkerLost("killed"))
    load = core.core.load()
    assert (load.running, load.waiting, load.blocks_cached) == (0, 1, 0)
    core.send(StepResult(late.step, b"\1\0\0\0"))
    assert core.plans == [] and core.core.metrics()["unknown_results"] == 1
    core.ready()
    added = core.plans[0].added[0]
    assert len(added.tokens) == 4 * 7 and added.computed == 0 and core.plans[0].removed == b""
    core.run()
    assert core.tokens[seq_id] == [60, 61, *[PLAIN] * 6]


def test_cached_prefixes_die_with_the_worker() -> None:
    core = Harness.with_worker()
    core.admit(ids(9))
    core.run()
    core.send(WorkerLost())
    core.ready()
    core.admit(ids(9))
    assert core.plans[0].added[0].computed == 0


def test_requests_wait_while_no_worker_is_there() -> None:
    core = Harness.with_worker()
    core.send(WorkerLost())
    seq_id = core.admit(ids(5))
    gone = core.admit(ids(5, 30))
    core.send(Abort(gone))
    assert core.plans == [] and core.finished[gone].reason is FinishReason.ABORT
    core.ready()
    core.run()
    assert core.finished[seq_id].reason is FinishReason.LENGTH


def test_a_sequence_that_ran_in_too_many_deaths_ends() -> None:
    core = Harness.with_worker(max_worker_deaths=2)
    seq_id = core.admit(ids(5))
    core.plans.clear()
    core.send(WorkerLost())
    innocent = core.admit(ids(5, 30))
    core.ready(max_rows=1)
    core.plans.clear()
    core.send(WorkerLost())
    assert set(core.finished) == {seq_id}
    assert core.finished[seq_id].reason is FinishReason.ERROR and "2 times" in core.finished[seq_id].message
    core.ready()
    core.run()
    assert core.finished[innocent].reason is FinishReason.LENGTH


def test_ready_again_means_the_worker_was_restarted() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    core.plans.clear()
    core.ready()
    assert core.plans[0].added[0].seq_id == seq_id and core.plans[0].removed == b""
    core.run()
    assert core.finished[seq_id].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("change", "prompt", "reason"),
    [
        ({"num_blocks": 2}, ids(9), FinishReason.ERROR),
        ({"max_model_len": 8}, ids(8), FinishReason.ERROR),
        ({"vocab_size": 90}, [5, 95], FinishReason.ERROR),
        ({"max_model_len": 8}, ids(7), FinishReason.LENGTH),
        ({"block_tokens": 2}, ids(9), FinishReason.LENGTH),
    ],
)
def test_a_smaller_worker_ends_what_it_cannot_serve(
    change: dict[str, int], prompt: list[int], reason: FinishReason
) -> None:
    core = Harness.with_worker()
    seq_id = core.admit(prompt)
    core.plans.clear()
    core.send(WorkerLost())
    core.send(WorkerReady(msgspec.structs.replace(core.facts, **change), 4))
    core.run()
    assert core.finished[seq_id].reason is reason
    assert core.all_free()


def test_output_that_fills_a_smaller_worker_ends_by_length() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    core.answer(60)
    core.answer(61)
    core.plans.clear()
    core.send(WorkerLost())
    core.send(WorkerReady(msgspec.structs.replace(core.facts, max_model_len=7), 4))
    assert core.finished[seq_id].reason is FinishReason.LENGTH
    assert core.tokens[seq_id] == [60, 61]

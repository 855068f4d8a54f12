"""The worker comes and goes; moves of sequences."""

import msgspec
import pytest

from common.protocol import Abort, FinishReason, Pause, StepResult, WorkerReady
from services.scheduler.events import Tick, WorkerLost
from services.scheduler.request import Stage
from services.scheduler.state import State
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


def stage(state: State, seq_id: int) -> Stage:
    return state.sequences[seq_id].stage


def test_a_paused_sequence_holds_nothing_and_loses_nothing() -> None:
    core = Harness.with_worker(max_rows=2)
    slow, other = core.admit(ids(9), max_tokens=20), core.admit(ids(9, 40), max_tokens=20)
    for _ in range(6):
        core.answer()
    said = len(core.tokens[slow])
    core.send(Pause(slow, True), Pause(slow, True))
    assert stage(core.core._state, slow) is Stage.PAUSED
    load = core.core.load()
    assert (load.running, load.waiting) == (1, 0)
    core.run()
    assert core.finished[other].reason is FinishReason.LENGTH and len(core.tokens[slow]) == said
    core.send(Tick())
    assert not core.core.idle
    core.send(Pause(slow, False), Pause(slow, False))
    added = core.plans[0].added[0]
    assert added.seq_id == slow and added.computed >= 8, "its blocks were found again"
    core.run()
    assert core.tokens[slow] == [PLAIN] * 20 and core.all_free() and core.core.metrics()["pauses"] == 1


def test_a_pause_of_what_waits_ends_or_is_unknown() -> None:
    core = Harness.with_worker(max_rows=1)
    running, waiting = core.admit(ids(3), max_tokens=2), core.admit(ids(3, 30))
    core.send(Pause(waiting, True), Pause(12345, True), Pause(-1, False))
    assert stage(core.core._state, running) is Stage.ENDING
    core.send(Pause(running, True))  # its last token is on its way already
    core.run()
    assert core.finished[running].reason is FinishReason.LENGTH and waiting not in core.tokens
    core.send(Abort(waiting))
    assert core.finished[waiting].reason is FinishReason.ABORT and core.core.idle


def test_an_abort_frees_all_choices_in_the_step_that_follows() -> None:
    """What a deadline does, with n = 3: one has a row, the others wait for its prompt."""
    core = Harness.with_worker(step_tokens=8, prefix_cache=False)
    seq_id = core.admit(ids(20), n=3)
    core.send(*[Abort(seq_id + choice) for choice in range(3)])
    assert core.all_free() and len(core.finished) == 3
    again = core.admit(ids(20), n=3)
    for _ in range(4):
        core.answer()
    core.send(*[Abort(again + choice) for choice in range(3)])
    assert core.all_free() and core.core.load().blocks_cached == 0

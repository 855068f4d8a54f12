"""The core from outside: events in, effects out."""

import gc

import msgspec
import pytest

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.metrics import checked
from common.protocol import Abort, Admit, FinishReason, Sampling, StepResult, Stop, make_seq_id, tokenizer_of
from services.scheduler.events import (
    ApiLost,
    Drain,
    Flush,
    SendPlan,
    SendRefused,
    SendTokens,
    Tick,
    TokenizerLost,
    WorkerLost,
)
from services.scheduler.request import Request, Row, Sequence
from tests.services.scheduler.harness import EOS, PLAIN, VOCAB, Harness, ids


def test_a_request_runs_to_its_length() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5), max_tokens=3)
    core.run()
    assert core.tokens[seq_id] == [PLAIN] * 3
    assert core.finished[seq_id].reason is FinishReason.LENGTH
    assert core.all_free() and core.core.idle


def test_plans_come_before_tokens_and_nothing_comes_of_nothing() -> None:
    core = Harness.with_worker()
    assert core.send() == [] and core.send(Tick()) == []
    core.admit(ids(5))
    kinds = [type(effect) for effect in core.answer()]
    assert kinds == [SendPlan, SendTokens]


def test_two_plans_are_in_flight_and_a_late_end_costs_one_row() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    assert len(core.plans) == 2
    core.answer(EOS)
    assert core.finished[seq_id].reason is FinishReason.EOS and core.finished[seq_id].stop_token == EOS
    core.answer(PLAIN)
    assert core.tokens[seq_id] == [EOS] and core.plans == []
    assert core.all_free()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_plans_in_flight_are_bounded(in_flight: int) -> None:
    core = Harness.with_worker(plans_in_flight=in_flight)
    core.admit(ids(5))
    for _ in range(4):
        assert len(core.plans) == in_flight
        core.answer()


@pytest.mark.parametrize(
    ("sampling", "answers", "reason", "count"),
    [
        ({"stop_token_ids": (7,)}, [PLAIN, 7], FinishReason.STOP_TOKEN, 2),
        ({"ignore_eos": True, "max_tokens": 4}, [EOS] * 9, FinishReason.LENGTH, 4),
        ({"min_tokens": 2}, [EOS, EOS, EOS], FinishReason.EOS, 3),
        ({"max_tokens": 1}, [PLAIN], FinishReason.LENGTH, 1),
        ({"max_tokens": 1}, [EOS], FinishReason.EOS, 1),
        ({"max_tokens": 3}, [PLAIN, PLAIN, EOS], FinishReason.EOS, 3),
        ({"max_tokens": 10**15}, [PLAIN] * 99, FinishReason.LENGTH, 59),
    ],
)
def test_ends(sampling: dict[str, object], answers: list[int], reason: FinishReason, count: int) -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5), **sampling)
    for token in answers:
        if core.plans:
            core.answer(token)
    core.run()
    assert core.finished[seq_id].reason is reason
    assert len(core.tokens[seq_id]) == count


@pytest.mark.parametrize("answers", [0, 1, 2, 5])
@pytest.mark.parametrize(("kind", "reason"), [(Abort, FinishReason.ABORT), (Stop, FinishReason.STOP_STRING)])
def test_abort_and_stop_at_any_time(kind: type, reason: FinishReason, answers: int) -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(9))
    for _ in range(answers):
        core.answer()
    core.send(kind(seq_id))
    core.send(kind(seq_id))
    core.run()
    assert core.finished[seq_id].reason is reason
    assert len(core.tokens.get(seq_id, [])) <= answers
    assert core.all_free()
    assert core.core.metrics()["unknown_results"] == 1


def test_abort_while_waiting_and_while_filling() -> None:
    core = Harness.with_worker(max_rows=1, step_tokens=4)
    filling, waiting = core.admit(ids(30)), core.admit(ids(5))
    assert core.core.load().waiting == 1
    core.send(Abort(waiting), Abort(filling))
    assert {seq_id: end.reason for seq_id, end in core.finished.items()} == dict.fromkeys(
        (filling, waiting), FinishReason.ABORT
    )
    core.run()
    assert core.all_free()


def test_a_lost_api_takes_its_sequences_along_and_a_lost_tokenizer_does_not() -> None:
    core = Harness.with_worker()
    owners = [(0, 0), (1, 0), (0, 1)]
    seq_ids = [make_seq_id(api, tokenizer, 1, 10 * api + tokenizer) for api, tokenizer in owners]
    core.send(*(Admit(seq_id, pack_i32(ids(5)), Sampling(max_tokens=4)) for seq_id in seq_ids))
    core.send(ApiLost(1))
    assert set(core.finished) == {seq_ids[1]}
    core.send(TokenizerLost(1))
    assert set(core.finished) == {seq_ids[1]}
    core.run()
    assert core.finished[seq_ids[0]].reason is core.finished[seq_ids[2]].reason is FinishReason.LENGTH


def test_batches_go_to_the_tokenizer_in_the_id() -> None:
    core = Harness.with_worker()
    first, second = make_seq_id(0, 1, 1, 1), make_seq_id(0, 2, 1, 2)
    prompt = pack_i32(ids(5))
    core.send(Admit(first, prompt, Sampling(max_tokens=9)), Admit(second, prompt, Sampling(max_tokens=9)))
    for _ in range(3):
        for effect in core.answer():
            if isinstance(effect, SendTokens):
                own = {1: first, 2: second}[effect.tokenizer]
                assert effect.batch.seq_ids == own.to_bytes(8, "little")
    core.send(Abort(first))
    core.run()
    assert len(core.tokens[second]) == 9 and len(core.tokens[first]) == 3


def test_admission_is_idempotent_even_after_the_end() -> None:
    core = Harness.with_worker()
    admit = core.message(ids(5))
    core.send(admit, admit)
    core.run()
    assert core.send(admit) == []
    assert len(core.tokens[admit.seq_id]) == 8
    overlapping = msgspec.structs.replace(admit, seq_id=admit.seq_id - 1, n=2)
    assert core.send(overlapping) == []
    assert core.core.metrics()["unknown_results"] == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": b""}, "invalid"),
        ({"tokens": b"\1\0\0"}, "invalid"),
        ({"tokens": pack_i32([1, VOCAB])}, "invalid"),
        ({"tokens": pack_i32([1, -1])}, "invalid"),
        ({"tokens": pack_i32([1] * 64)}, "too_long"),
        ({"n": 0}, "invalid"),
        ({"n": -(10**9)}, "invalid"),
        ({"n": 10**9}, "invalid"),
        ({"sampling": Sampling(max_tokens=0)}, "invalid"),
        ({"output": b"\1"}, "invalid"),
        ({"output": pack_i32([VOCAB])}, "invalid"),
        ({"output": pack_i32([1]), "n": 2}, "invalid"),
        ({"origin": 77, "n": 2}, "invalid"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, object], reason: str) -> None:
    core = Harness.with_worker()
    admit = msgspec.structs.replace(core.message(ids(5)), **change)
    effects = core.send(admit)
    assert [type(effect) for effect in effects] == [SendRefused]
    assert (core.refused[0].seq_id, core.refused[0].reason) == (admit.seq_id, reason)
    assert core.core.idle and core.core.metrics()["refused"] == 1


def test_the_refusal_of_a_long_prompt_names_the_limits() -> None:
    core = Harness.with_worker(blocks=3)
    core.admit(ids(12))
    message = core.refused[0].message
    assert "12 tokens" in message and "model: 64" in message and "KV blocks: 3 of 4 tokens" in message


@pytest.mark.parametrize("seq_id", [-1, 2**64, 2**64 - 1])
def test_an_impossible_id_is_counted(seq_id: int) -> None:
    core = Harness.with_worker()
    assert core.send(Admit(seq_id, pack_i32(ids(3)), Sampling(max_tokens=1), n=2)) == []
    assert core.core.metrics()["unknown_results"] == 1


def test_a_full_queue_refuses_but_not_what_was_accepted_before() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting=2)
    for _ in range(3):
        core.admit(ids(3))
    assert core.refused == []
    core.admit(ids(3))
    assert core.refused[0].reason == "overloaded"
    accepted = msgspec.structs.replace(core.message(ids(3)), output=pack_i32([5]))
    core.tokens[accepted.seq_id] = [5]
    core.send(accepted)
    assert len(core.refused) == 1
    core.run()
    assert core.all_free()


def test_draining_refuses_and_finishes() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(5))
    core.send(Drain())
    core.admit(ids(5))
    assert core.refused[0].reason == "unavailable" and not core.core.idle
    core.run()
    assert core.finished[seq_id].reason is FinishReason.LENGTH and core.core.idle


def test_requests_wait_for_the_first_worker_and_are_checked_then() -> None:
    core = Harness()
    good = core.admit(ids(5))
    bad = core.message([1, VOCAB])
    negative = core.message([1, -1])
    long = core.message(ids(64))
    core.send(bad, negative, long)
    assert core.plans == [] and core.finished == {}
    core.ready()
    core.run()
    assert core.finished[good].reason is FinishReason.LENGTH
    for refused in (bad, negative, long):
        assert core.finished[refused.seq_id].reason is FinishReason.ERROR
        assert "do not fit" in core.finished[refused.seq_id].message


def test_output_so_far_is_continued() -> None:
    core = Harness.with_worker()
    admit = msgspec.structs.replace(core.message(ids(5), max_tokens=6), output=pack_i32([70, 71]))
    core.tokens[admit.seq_id] = [70, 71]
    core.send(admit)
    assert core.plans[0].added[0].num_prompt == 5
    assert list(unpack_i32(core.plans[0].added[0].tokens)) == [*ids(5), 70, 71]
    core.run()
    assert core.tokens[admit.seq_id] == [70, 71, *[PLAIN] * 4]


def test_whole_output_ends_at_once() -> None:
    core = Harness.with_worker()
    admit = msgspec.structs.replace(core.message(ids(5), max_tokens=2), output=pack_i32([70, 71]))
    core.send(admit)
    assert core.finished[admit.seq_id].reason is FinishReason.LENGTH and core.plans == []


def test_unknown_things_are_counted_and_ignored() -> None:
    core = Harness.with_worker()
    core.send(Abort(5), Stop(6), StepResult(77, b"x"), WorkerLost())
    assert core.core.metrics()["unknown_results"] == 3
    core.send(WorkerLost("again"))


def test_a_worker_that_can_run_nothing_is_a_fault() -> None:
    core = Harness(blocks=0)
    core.ready()
    assert "can run nothing" in core.faults[0]


def test_a_step_without_a_result_by_its_deadline_costs_the_worker() -> None:
    core = Harness.with_worker(step_deadline_s=20.0)
    seq = core.admit(ids(5))
    core.answer()
    late = core.plans[0].step
    core.now_s += 15.0
    assert core.send(Tick()) == [] and not core.faults
    core.now_s += 10.0
    core.send(Tick())
    (fault,) = core.faults
    assert fault.startswith(f"step {late} is stuck: no result for 27.0 s, 20.0 s are allowed for 1 rows")
    assert core.core.metrics()["stuck_steps"] == 1 and core.core.load().waiting == 1
    # Its late result is for nobody; a new worker goes on from what was received.
    core.send(StepResult(late, pack_i32([PLAIN])))
    assert core.tokens[seq] == [PLAIN] and core.core.metrics()["unknown_results"] == 1
    core.ready()
    core.run()
    assert core.tokens[seq] == [PLAIN] * 8 and core.finished[seq].reason is FinishReason.LENGTH


def test_results_that_come_with_the_tick_count_first() -> None:
    core = Harness.with_worker(step_deadline_s=20.0)
    core.admit(ids(5))
    core.now_s += 100.0
    core.send(StepResult(core.plans[0].step, pack_i32([PLAIN])), Tick())
    assert not core.faults


def test_a_request_in_two_stuck_steps_is_ended() -> None:
    core = Harness.with_worker(step_deadline_s=20.0, max_worker_deaths=2)
    seq = core.admit(ids(5))
    for _ in range(2):
        core.now_s += 30.0
        core.send(Tick())
        core.ready()
    assert core.finished[seq].reason is FinishReason.ERROR and "died 2 times" in core.finished[seq].message
    assert len(core.faults) == 2 and core.all_free()


def test_an_idle_worker_is_never_late() -> None:
    core = Harness.with_worker(step_deadline_s=1.0)
    core.now_s += 1000.0
    core.send(Tick())
    core.admit(ids(5))
    core.send(Tick())
    assert not core.faults


def test_the_core_owes_plans_only_while_none_is_in_flight() -> None:
    core = Harness()
    assert core.core.work() == (0, 0)
    core.admit(ids(5))
    assert core.core.work() == (0, 0)  # no worker
    core.ready()
    owed, made = core.core.work()
    assert (owed, made) == (0, len(core.plans)) and made > 0  # the worker owes


def test_load_and_fragmentation() -> None:
    core = Harness(blocks=10)
    assert core.core.load().blocks_total == 0 and core.core.fragmentation() == 0.0
    core.admit(ids(6))
    assert core.core.load().waiting == 1
    core.ready()
    load = core.core.load()
    assert (load.running, load.waiting, load.blocks_total, load.blocks_free, load.steps) == (1, 0, 10, 8, 2)
    assert load.tokens_in_flight == 7
    assert core.core.fragmentation() == 1 / 8
    core.run()
    load = core.core.load()
    assert load.blocks_free + load.blocks_cached == 10 and load.blocks_cached == 3


def test_after_a_flush_nobody_finds_a_prefix_and_who_runs_goes_on() -> None:
    core = Harness.with_worker(blocks=10)
    first = core.admit(ids(6), max_tokens=4)
    core.run()
    assert core.core.load().blocks_cached > 0
    running = core.admit(ids(6), max_tokens=4)
    core.send(Flush())
    assert core.core.load().blocks_cached == 0
    again = core.admit(ids(6), max_tokens=4)
    core.run()
    cached = [core.finished[each].cached_tokens for each in (first, running, again)]
    assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0
    assert core.tokens[running] == core.tokens[again] and core.all_free()


def test_the_story_is_told_during_and_after_life() -> None:
    core = Harness.with_worker()
    seq_id = core.admit(ids(6))
    assert any("admitted with 6 tokens" in line for line in core.core.story(seq_id))
    core.run()
    assert core.core.story(seq_id)[-1].endswith("LENGTH")
    assert core.core.story(12345) == []


def test_metrics_have_listed_names() -> None:
    assert checked(Harness().core.metrics())


def test_effects_name_the_tokenizer_of_refused_requests() -> None:
    core = Harness.with_worker()
    seq_id = make_seq_id(1, 7, 1, 1)
    (effect,) = core.send(Admit(seq_id, b"", Sampling(max_tokens=1)))
    assert isinstance(effect, SendRefused) and effect.tokenizer == tokenizer_of(seq_id) == 7


def test_nothing_of_an_ended_request_is_kept_even_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        core = Harness.with_worker(step_tokens=16, max_rows=3)
        seq_ids = [core.admit(ids(20 + number), n=2) for number in range(6)]
        core.answer()
        core.send(Abort(seq_ids[0]), Abort(seq_ids[5]))
        core.plans.clear()
        core.send(WorkerLost())
        core.ready()
        core.run()
        assert len(core.finished) == 12
        assert [kept for kept in gc.get_objects() if type(kept) in (Sequence, Row, Request)] == []
    finally:
        gc.enable()


def test_acceptance_is_told_with_the_next_batch_or_the_next_tick() -> None:
    core = Harness.with_worker(max_rows=1)

    def told(effects: list[object]) -> list[int]:
        batches = [effect.batch for effect in effects if isinstance(effect, SendTokens)]
        return [seq_id for batch in batches for seq_id in unpack_u64(batch.accepted)]

    first, second = core.message(ids(3), max_tokens=40), core.message(ids(3, 30), n=2)
    assert told(core.send(first, second)) == []  # no message of its own
    assert told(core.answer()) == [first.seq_id, second.seq_id]
    assert told(core.answer()) == []
    third = core.message(ids(3, 60))
    core.send(third, core.message([]))
    assert told(core.send(Tick())) == [third.seq_id]


def test_the_wait_of_a_new_request_is_estimated() -> None:
    core = Harness.with_worker(max_rows=1, prefix_cache=False)
    core.admit(ids(3), max_tokens=3)
    for _ in range(20):
        core.send(core.message(ids(10), max_tokens=3))
    assert core.core.load().wait_s == 0
    for _ in range(30):
        core.answer()
        core.send(Tick())
    load = core.core.load()
    assert load.waiting_tokens > 0 and 0 < load.wait_s < 1000

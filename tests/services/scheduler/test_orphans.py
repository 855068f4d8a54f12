import msgspec
import pytest

from common.columns import pack_i32
from common.protocol import Abort, Admit, FinishReason, Sampling, make_seq_id, tokenizer_of
from services.scheduler.events import SendTokens, Tick, TokenizerLost, WorkerLost
from tests.services.scheduler.harness import PLAIN, Harness, ids

OLD, NEW, NEWER = make_seq_id(0, 0, 9, 500), make_seq_id(0, 1, 9, 501), make_seq_id(0, 2, 9, 502)


def admit(seq_id: int, origin: int = -1, max_tokens: int = 12) -> Admit:
    return Admit(seq_id, pack_i32(ids(5)), Sampling(max_tokens=max_tokens), origin=origin)


def started(answers: int = 3, **limits: int) -> Harness:
    core = Harness.with_worker(**limits)
    core.send(admit(OLD))
    for number in range(answers):
        core.answer(60 + number)
    return core


@pytest.mark.parametrize("answers", range(12))
def test_a_takeover_gives_all_output_and_what_is_in_flight_follows(answers: int) -> None:
    """Filling, stepping or about to end; two plans are in flight under the old id."""
    core = started(answers)
    core.send(TokenizerLost(0))
    effects = core.send(admit(NEW, OLD))
    before = core.tokens.get(OLD, [])
    assert core.tokens.get(NEW, []) == before == [60 + number for number in range(answers)]
    assert [effect.tokenizer for effect in effects if isinstance(effect, SendTokens)] == [1]
    core.run()
    assert core.tokens[NEW] == [*before, *[PLAIN] * (12 - answers)]
    assert core.tokens.get(OLD, []) == before and OLD not in core.finished
    assert core.finished[NEW].reason is FinishReason.LENGTH and core.all_free()


def test_neighbours_keep_their_tokenizer() -> None:
    core = started()
    other = core.admit(ids(5), max_tokens=12)
    core.answer()
    core.answer()
    core.send(TokenizerLost(0))
    core.send(admit(NEW, OLD))
    core.run()
    assert len(core.tokens[NEW]) == len(core.tokens[other]) == 12


def test_it_runs_on_alone_and_its_end_waits_for_the_successor() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.run()
    core.send(admit(NEW, OLD))
    assert core.tokens[NEW] == core.tokens[OLD] and core.finished[NEW].reason is FinishReason.LENGTH
    assert core.core.idle and core.core.metrics()["requests"] == 1


def test_a_second_death_finds_it_by_its_origin() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.send(admit(NEW, OLD))
    core.answer()
    core.send(TokenizerLost(1))
    core.send(admit(NEWER, OLD))
    core.run()
    assert len(core.tokens[NEWER]) == 12 and NEW not in core.finished
    assert any("taken over" in line for line in core.core.story(OLD))
    assert core.core.story(OLD) == core.core.story(NEWER)


def test_what_nobody_knows_is_admitted_and_found_after_a_second_death() -> None:
    core = Harness.with_worker()
    core.send(admit(NEW, OLD))
    core.answer()
    core.send(admit(NEWER, OLD))
    core.run()
    assert len(core.tokens[NEWER]) == 12 and core.core.metrics()["requests"] == 1


def test_a_sequence_of_another_api_cannot_be_taken() -> None:
    core = started()
    thief = make_seq_id(1, 1, 9, 600)
    core.send(admit(thief, OLD))
    assert core.refused[0].seq_id == thief
    core.run()
    assert len(core.tokens[OLD]) == 12


def test_what_nobody_takes_over_is_freed() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.core.handle([Tick()], core.now_s + 30.0)
    assert not core.core.idle
    core.core.handle([Tick()], core.now_s + 30.1)
    assert core.core.idle
    core.run()
    assert core.all_free()
    core.send(admit(NEW, OLD))
    core.run()
    assert len(core.tokens[NEW]) == 12, "a late successor starts from the prompt"


def test_time_without_a_worker_does_not_count() -> None:
    """The worker died with the tokenizer, and loads its model for longer than a tokenizer is waited for."""
    core = started()
    core.send(WorkerLost(), TokenizerLost(0))
    for _ in range(100):
        core.now_s += 10.0
        core.core.handle([Tick()], core.now_s)
    assert not core.core.idle
    core.ready()
    core.core.handle([Tick()], core.now_s + 29.0)
    assert not core.core.idle
    core.send(admit(NEW, OLD))
    core.run()
    assert len(core.tokens[NEW]) == 12


def test_what_was_taken_over_is_not_freed() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.send(admit(NEW, OLD))
    core.core.handle([Tick()], core.now_s + 100.0)
    assert not core.core.idle


def test_an_abort_by_the_first_id_ends_it() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.send(admit(NEW, OLD))
    core.send(Abort(OLD))
    assert core.finished[NEW].reason is FinishReason.ABORT
    core.run()
    assert core.all_free()


def test_it_waits_for_a_worker_too() -> None:
    core = started()
    core.plans.clear()
    core.send(TokenizerLost(0), WorkerLost("killed"))
    core.send(admit(NEW, OLD))
    core.ready()
    core.run()
    assert core.tokens[NEW] == [60, 61, 62, *[PLAIN] * 9]


def test_it_was_accepted_before_so_a_full_queue_takes_it() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting=1)
    core.admit(ids(4))
    core.admit(ids(4))
    core.send(admit(NEW, OLD))
    assert core.refused == []
    core.run()
    assert tokenizer_of(NEW) == 1 and len(core.tokens[NEW]) == 12


def test_a_repeat_changes_nothing() -> None:
    core = started()
    core.send(TokenizerLost(0))
    core.send(admit(NEW, OLD))
    assert core.send(admit(NEW, OLD), admit(OLD)) == []
    core.run()
    assert len(core.tokens[NEW]) == 12
    assert core.send(admit(NEW, OLD)) == []


@pytest.mark.parametrize("ended", [False, True])
def test_what_an_earlier_successor_said_comes_too_late(ended: bool) -> None:
    core = started()
    core.send(TokenizerLost(0))
    if ended:
        core.run()
    core.send(admit(NEWER, OLD))
    assert core.send(admit(NEW, OLD)) == [] and core.core.metrics()["unknown_results"] == 1
    core.run()
    assert len(core.tokens[NEWER]) == 12 and NEW not in core.tokens


def test_the_output_of_an_earlier_scheduler_is_kept() -> None:
    core = Harness.with_worker()
    core.tokens[NEW] = [60, 61]
    core.send(msgspec.structs.replace(admit(NEW, OLD), output=pack_i32([60, 61])))
    core.answer()
    core.send(admit(NEWER, OLD))
    core.run()
    assert core.tokens[NEWER][:2] == [60, 61] and len(core.tokens[NEWER]) == 12


def attach(seq_id: int, origin: int) -> Admit:
    return msgspec.structs.replace(admit(seq_id, origin), attach=True)


def test_who_is_only_asked_says_no_or_goes_on_with_it() -> None:
    core = started()
    core.send(attach(NEWER, NEW))
    assert [(refused.seq_id, refused.reason) for refused in core.refused] == [(NEWER, "not_found")]
    core.send(TokenizerLost(0))
    core.send(attach(NEW, OLD))
    core.run()
    assert len(core.refused) == 1 and core.tokens[NEW] == [60, 61, 62, *[PLAIN] * 9]


def test_who_is_asked_without_a_worker_answers_too() -> None:
    core = Harness()
    core.send(attach(NEW, OLD))
    assert core.refused[0].reason == "not_found"

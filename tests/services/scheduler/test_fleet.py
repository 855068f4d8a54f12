"""Groups join, die, leave; sequences find their places. The simulator (tests/sim) does all of it at random."""

from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.metrics import checked
from common.protocol import (
    Abort,
    Admit,
    Finished,
    FinishReason,
    ModelFacts,
    Refused,
    Sampling,
    StepPlan,
    StepResult,
    WorkerReady,
    make_seq_id,
)
from services.scheduler.events import (
    ApiLost,
    Drain,
    Effect,
    FleetEvent,
    GroupJoined,
    GroupLost,
    GroupReady,
    GroupRefused,
    GroupResult,
    SendPlan,
    SendRefused,
    SendTokens,
    Tick,
    WorkerFault,
)
from services.scheduler.fleet import Fleet, difference
from tests.services.scheduler.harness import PLAIN, ids

FACTS = ModelFacts("m", "a", 100, 64, (2,), 4, 64)
RECOVER_S = 30.0


class Harness:
    def __init__(self, groups: int = 0, **limits: Any) -> None:
        self.fleet = Fleet(Scheduler(**limits), Kv(), seed=5, recover_s=RECOVER_S)
        self.plans: dict[int, list[StepPlan]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.refused: list[Refused] = []
        self.counter = 0
        self.now_s = 0.0
        for group in range(groups):
            self.ready(group)

    def send(self, *events: FleetEvent) -> list[Effect]:
        self.now_s += 0.01
        effects = self.fleet.handle(events, self.now_s)
        self.fleet.check()
        for effect in effects:
            match effect:
                case SendPlan(plan, group):
                    self.plans.setdefault(group, []).append(plan)
                case SendRefused(_, refused):
                    self.refused.append(refused)
                case SendTokens(_, batch):
                    rows = (unpack_u64(batch.seq_ids), unpack_i32(batch.first_index), unpack_i32(batch.tokens))
                    for seq_id, index, token in zip(*rows, strict=True):
                        stream = self.tokens.setdefault(seq_id, [])
                        assert index == len(stream) and seq_id not in self.finished
                        stream.append(token)
                    self.finished |= {end.seq_id: end for end in batch.finished}
        return effects

    def ready(self, group: int, max_rows: int = 8, **facts: Any) -> list[Effect]:
        return self.send(GroupReady(group, WorkerReady(msgspec.structs.replace(FACTS, **facts), max_rows)))

    def message(self, prompt: list[int], n: int = 1, **sampling: Any) -> Admit:
        self.counter += n
        return Admit(make_seq_id(0, 0, 9, self.counter), pack_i32(prompt), Sampling(**{"max_tokens": 8, **sampling}), n)

    def admit(self, prompt: list[int], **options: Any) -> int:
        admit = self.message(prompt, **options)
        self.send(admit)
        return admit.seq_id

    def answer(self, group: int, token: int = PLAIN) -> list[Effect]:
        plan = self.plans[group].pop(0)
        return self.send(GroupResult(group, StepResult(plan.step, pack_i32([token] * plan.samples.count(1)))))

    def run(self) -> None:
        for _ in range(500):
            group = next((group for group, plans in self.plans.items() if plans), None)
            if group is None:
                return
            self.answer(group)
        raise AssertionError("does not end")

    def lose(self, group: int, died: bool = True) -> list[Effect]:
        self.plans.pop(group, None)
        return self.send(GroupLost(group, "gone", died))

    def where(self, seq_id: int) -> int:
        return next(group for group, core in self.fleet._groups.items() if seq_id in core.state.sequences)


def test_requests_spread_over_groups_and_keep_to_their_prefix() -> None:
    fleet = Harness(groups=2)
    first, second = fleet.admit(ids(20)), fleet.admit(ids(20, 60))
    assert {fleet.where(first), fleet.where(second)} == {0, 1}
    fleet.run()
    again = fleet.admit(ids(20, 60))
    assert fleet.where(again) == 1
    assert fleet.plans[1][0].added[0].computed == 16
    fleet.run()
    assert len(fleet.finished) == 3


def test_choices_of_a_request_stay_together() -> None:
    fleet = Harness(groups=3)
    seq_id = fleet.admit(ids(9), n=4)
    assert len({fleet.where(seq_id + choice) for choice in range(4)}) == 1
    fleet.run()
    assert len(fleet.finished) == 4


def test_rows_of_a_dead_group_go_on_in_another_at_once() -> None:
    fleet = Harness(groups=2)
    seq_id = fleet.admit(ids(6))
    group = fleet.where(seq_id)
    fleet.answer(group, 41)
    fleet.answer(group, 42)
    late = fleet.plans[group][0]
    fleet.lose(group)
    other = 1 - group
    added = fleet.plans[other][0].added[0]
    assert unpack_i32(added.tokens).tolist() == [*ids(6), 41, 42] and added.num_prompt == 6
    fleet.send(GroupResult(group, StepResult(late.step, pack_i32([99]))))  # the dead speaks
    fleet.run()
    assert fleet.tokens[seq_id] == [41, 42, *[PLAIN] * 6]
    assert fleet.fleet.metrics()["unknown_results"] == 1 and fleet.fleet.metrics()["moved"] == 1


def test_siblings_in_different_groups_share_nothing() -> None:
    fleet = Harness(groups=2, max_rows=2)
    seq_id = fleet.admit(ids(9), n=4)
    group = fleet.where(seq_id)
    for _ in range(3):
        fleet.answer(group)
    fleet.lose(group)  # two had rows, two waited
    fleet.ready(2)
    fleet.run()
    assert [len(fleet.tokens[seq_id + choice]) for choice in range(4)] == [8] * 4


def test_without_another_group_all_wait_and_requests_are_checked_and_queued() -> None:
    fleet = Harness(groups=1)
    seq_id = fleet.admit(ids(6))
    fleet.lose(0)
    assert fleet.fleet.model is None and not fleet.fleet.idle
    waiting = fleet.admit(ids(7))
    fleet.admit(ids(64))
    assert fleet.refused[0].reason == "too_long"
    fleet.ready(7)
    assert fleet.fleet.model == FACTS
    fleet.run()
    assert {seq_id, waiting} == set(fleet.finished) and len(fleet.tokens[seq_id]) == 8


def test_a_death_counts_and_a_leave_does_not() -> None:
    fleet = Harness(groups=1, max_worker_deaths=2)
    seq_id = fleet.admit(ids(6), max_tokens=50)
    for group in range(1, 5):
        fleet.ready(group)
        fleet.lose(group - 1, died=False)
    assert fleet.finished == {} and fleet.where(seq_id) == 4
    fleet.ready(5)
    fleet.lose(4)
    fleet.lose(5)
    assert fleet.finished[seq_id].reason is FinishReason.ERROR and "2 times" in fleet.finished[seq_id].message


def test_a_group_that_joins_takes_over_waiting_sequences() -> None:
    fleet = Harness(groups=1, max_rows=2)
    seq_ids = [fleet.admit(ids(6, number)) for number in range(10)]
    fleet.answer(0)
    fleet.ready(1)
    assert sum(fleet.where(seq_id) == 1 for seq_id in seq_ids) == 2  # as many as it has rows
    assert [fleet.where(seq_id) for seq_id in seq_ids[2:4]] == [1, 1]  # the oldest
    assert len(fleet.plans[1][0].added) == 2
    fleet.run()
    assert len(fleet.finished) == 10


def test_what_is_being_computed_stays_and_what_would_lose_by_it_too() -> None:
    fleet = Harness(groups=1)
    seq_id = fleet.admit(ids(6))
    fleet.ready(1)
    fleet.send(Tick())
    assert fleet.where(seq_id) == 0 and fleet.plans.get(1) is None


@pytest.mark.parametrize(
    "change", [{"name": "x"}, {"vocab_size": 99}, {"max_model_len": 60}, {"block_tokens": 2}, {"eos_token_ids": (3,)}]
)
def test_a_group_of_another_model_is_refused_as_long_as_there_are_others(change: dict[str, Any]) -> None:
    fleet = Harness(groups=1)
    (refused,) = fleet.ready(1, **change)
    assert isinstance(refused, GroupRefused) and refused.group == 1 and next(iter(change)) in refused.reason
    assert list(fleet.fleet.loads()) == [0]
    fleet.lose(0)
    assert isinstance(fleet.ready(1, **change)[0], GroupJoined)  # nothing is open any more


def test_another_model_replaces_the_old_one_only_after_a_while() -> None:
    fleet = Harness(groups=1)
    begun, fresh = fleet.admit(ids(6)), fleet.message(ids(7))
    fleet.answer(0, 41)
    fleet.lose(0)
    fleet.send(fresh)
    assert "requests wait" in fleet.ready(1, name="x")[0].reason
    fleet.now_s += RECOVER_S
    assert GroupJoined(1, msgspec.structs.replace(FACTS, name="x")) in fleet.ready(1, name="x")
    assert "replaced" in fleet.finished[begun].message
    fleet.run()
    assert fleet.finished[fresh.seq_id].reason is FinishReason.LENGTH


def test_other_block_counts_are_fine_and_a_sequence_goes_where_it_fits() -> None:
    fleet = Harness(groups=0)
    fleet.ready(0, num_blocks=5)
    fleet.ready(1)
    long = fleet.admit(ids(30))
    assert fleet.where(long) == 1
    fleet.lose(1)
    end = fleet.finished[long]
    assert end.reason is FinishReason.ERROR and "fit no worker group any more; the largest takes 20" in end.message
    fleet.admit(ids(30, 50))
    assert fleet.refused[0].reason == "too_long"


def test_a_refusal_means_that_all_groups_are_full() -> None:
    fleet = Harness(groups=2, max_rows=1, max_waiting=2)
    for number in range(6):
        fleet.admit(ids(5, number * 10))
    assert fleet.refused == []
    for number in range(6, 9):
        fleet.admit(ids(5, number * 10))
    assert {refused.reason for refused in fleet.refused} == {"overloaded"}
    fleet.lose(0)  # accepted is accepted
    fleet.run()
    assert len(fleet.finished) + len(fleet.refused) == 9


def test_a_queue_full_of_tokens_is_full_to_the_router_too() -> None:
    fleet = Harness(groups=2, max_rows=1, step_tokens=8, max_waiting_tokens=20)
    prompt = ids(40)
    fleet.admit(prompt, max_tokens=1)
    fleet.run()
    homes = [fleet.where(fleet.admit(each, max_tokens=1)) for each in (prompt, ids(50, 40), prompt)]
    assert homes == [0, 1, 0]  # one waits where its prefix is, and fills that queue
    assert fleet.where(fleet.admit(prompt, max_tokens=1)) == 1  # though it costs more there
    assert fleet.refused == []


def test_admission_is_idempotent_over_all_groups() -> None:
    fleet = Harness(groups=2)
    admit = fleet.message(ids(6), n=2)
    fleet.send(admit)
    group = fleet.where(admit.seq_id)
    for seq_id in (admit.seq_id, admit.seq_id + 1):
        fleet.send(msgspec.structs.replace(admit, seq_id=seq_id, n=1))
    fleet.send(admit, msgspec.structs.replace(admit, seq_id=admit.seq_id - 1))
    fleet.run()
    assert fleet.send(admit) == []
    assert len(fleet.finished) == 2 and not fleet.plans.get(1 - group)
    assert fleet.fleet.metrics()["unknown_results"] == 5


def test_a_takeover_finds_its_sequence_before_and_after_a_move() -> None:
    fleet = Harness(groups=2)
    admit = fleet.message(ids(6))
    fleet.send(admit)
    group = fleet.where(admit.seq_id)
    fleet.answer(group, 41)
    heirs = [make_seq_id(0, tokenizer, 9, 100 + tokenizer) for tokenizer in (1, 2)]
    fleet.send(msgspec.structs.replace(admit, seq_id=heirs[0], origin=admit.seq_id))
    assert fleet.where(heirs[0]) == group and fleet.tokens[heirs[0]] == [41]
    # The group's death and the next takeover in one call.
    fleet.plans.pop(group)
    takeover = msgspec.structs.replace(admit, seq_id=heirs[1], origin=admit.seq_id)
    fleet.send(GroupLost(group, "gone"), takeover)
    assert fleet.where(heirs[1]) == 1 - group and fleet.tokens[heirs[1]] == [41]
    fleet.run()
    assert len(fleet.tokens[heirs[1]]) == 8
    fleet.send(Abort(admit.seq_id))
    assert any("taken over" in line for line in fleet.fleet.story(admit.seq_id))


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_who_is_only_asked_for_a_sequence_says_no_at_once(groups: int) -> None:
    core = Harness(groups)
    asked = msgspec.structs.replace(core.message(ids(5)), origin=make_seq_id(0, 1, 9, 0), attach=True)
    core.send(asked)
    assert [(refused.seq_id, refused.reason) for refused in core.refused] == [(asked.seq_id, "not_found")]
    assert core.fleet.idle


@pytest.mark.parametrize("groups", [1, 2])
def test_what_was_aborted_may_come_back_from_another_scheduler(groups: int) -> None:
    core = Harness(groups)
    first = core.message(ids(5))
    core.send(first)
    core.send(Abort(first.seq_id))
    core.send(first)
    assert core.fleet.idle and core.finished.pop(first.seq_id).reason is FinishReason.ABORT
    core.send(msgspec.structs.replace(first, again=True))
    core.run()
    assert len(core.tokens[first.seq_id]) == 8 and core.finished[first.seq_id].reason is FinishReason.LENGTH


def test_aborts_and_lost_apis_reach_every_group() -> None:
    fleet = Harness(groups=2)
    seq_ids = [fleet.admit(ids(5, number * 20)) for number in range(4)]
    assert {fleet.where(seq_id) for seq_id in seq_ids} == {0, 1}
    fleet.send(Abort(seq_ids[0]))
    assert set(fleet.finished) == {seq_ids[0]}
    fleet.send(ApiLost(0))
    assert set(fleet.finished) == set(seq_ids)
    fleet.run()
    assert fleet.fleet.load().running == 0


def test_early_requests_wait_for_the_first_group_and_are_judged_then() -> None:
    fleet = Harness(max_waiting=2)
    messages = [fleet.message(ids(5, number)) for number in range(5)]
    fleet.send(*messages, fleet.message(ids(64)), messages[0])
    assert [refused.reason for refused in fleet.refused] == ["overloaded"] * 2 and not fleet.fleet.idle
    accepted = msgspec.structs.replace(fleet.message(ids(5)), output=pack_i32([50]))
    fleet.tokens[accepted.seq_id] = [50]
    fleet.send(accepted, Abort(messages[0].seq_id))
    assert len(fleet.refused) == 2  # what was accepted before is not refused
    fleet.ready(0)
    fleet.run()
    assert fleet.finished[accepted.seq_id].reason is FinishReason.LENGTH


def test_an_api_that_died_before_the_first_group_leaves_nothing_behind() -> None:
    fleet = Harness()
    seq_id = fleet.admit(ids(5))
    fleet.send(ApiLost(0))
    fleet.ready(0)
    assert fleet.finished[seq_id].reason is FinishReason.ABORT and fleet.plans == {}


def test_a_group_that_breaks_the_protocol_is_named_and_its_sequences_move() -> None:
    fleet = Harness(groups=2)
    seq_id = fleet.admit(ids(5))
    group = fleet.where(seq_id)
    plan = fleet.plans.pop(group)[0]
    effects = fleet.send(GroupResult(group, StepResult(plan.step, pack_i32([1000]))))
    (fault,) = [effect for effect in effects if isinstance(effect, WorkerFault)]
    assert fault.group == group and "1000" in fault.reason
    assert fleet.where(seq_id) == 1 - group
    (hopeless,) = fleet.ready(9, num_blocks=0)
    assert isinstance(hopeless, WorkerFault) and hopeless.group == 9


def test_repeats_and_strangers_change_nothing() -> None:
    fleet = Harness(groups=1)
    seq_id = fleet.admit(ids(5))
    assert fleet.ready(0) == [] and fleet.where(seq_id) == 0
    fleet.send(GroupLost(77), GroupResult(77, StepResult(1, b"")))
    fleet.run()
    assert fleet.finished[seq_id].reason is FinishReason.LENGTH


def test_draining_refuses_also_in_groups_that_join_later() -> None:
    fleet = Harness(groups=1)
    seq_id = fleet.admit(ids(5))
    fleet.send(Drain())
    fleet.lose(0)
    fleet.ready(1)
    fleet.ready(2)
    fleet.admit(ids(5))
    assert fleet.refused[0].reason == "unavailable"
    fleet.run()
    assert fleet.fleet.idle and fleet.finished[seq_id].reason is FinishReason.LENGTH


def test_figures_are_of_all_groups_and_never_go_back() -> None:
    fleet = Harness(groups=2)
    for number in range(4):
        fleet.admit(ids(5, number * 20))
    for group in (0, 1):
        fleet.answer(group)
    load = fleet.fleet.load()
    assert (load.running, load.blocks_total) == (4, 128)
    assert [load.running for load in fleet.fleet.loads().values()] == [2, 2]
    assert checked(fleet.fleet.metrics())
    steps = fleet.fleet.load().steps
    fleet.lose(0)
    assert fleet.fleet.load().steps >= steps == 6
    fleet.run()
    assert fleet.fleet.metrics()["output_tokens"] >= 32 and fleet.fleet.metrics()["open_requests"] == 0


def test_what_makes_models_different() -> None:
    assert difference(FACTS, msgspec.structs.replace(FACTS, num_blocks=1, dtype="x", ops_hash="y")) == ""
    assert difference(FACTS, msgspec.structs.replace(FACTS, vocab_size=5)) == "vocab_size 5 instead of 100"

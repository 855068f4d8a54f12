"""Tenants, priorities that age, bounds, pauses: through the whole core."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.columns import unpack_u64
from common.protocol import Abort, Admit, FinishReason, Pause
from services.scheduler.events import SendTokens, Tick
from services.scheduler.request import Stage
from services.scheduler.state import State
from tests.services.scheduler.harness import PLAIN, Harness, ids


def owned(core: Harness, tenant: str, weight: int = 1, tokens: int = 5, priority: int = 0, **more: int) -> Admit:
    admit = core.message(ids(tokens, core.next_counter % 50), priority=priority, **more)
    return msgspec.structs.replace(admit, tenant=tenant, weight=weight)


@dataclass
class Load:
    """Each tenant always has a few requests open; `served` are its prompt and output tokens."""

    core: Harness
    weights: dict[str, int]
    shape: dict[str, tuple[int, int]]  # tokens of prompts and of outputs
    open: dict[str, set[int]] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def step(self, depth: int) -> None:
        for name, weight in self.weights.items():
            mine = self.open.setdefault(name, set())
            prompt, output = self.shape[name]
            for seq_id in [seq_id for seq_id in mine if seq_id in self.core.finished]:
                mine.remove(seq_id)
                self.served[name] = self.served.get(name, 0) + prompt + output
            while len(mine) < depth:
                admit = owned(self.core, name, weight, prompt, max_tokens=output)
                self.core.send(admit)
                mine.add(admit.seq_id)
        if self.core.plans:
            self.core.answer()


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 5)])
@pytest.mark.parametrize("shapes", [((4, 8), (4, 8)), ((40, 3), (3, 20))])
def test_busy_tenants_share_the_tokens_by_weight(
    weights: tuple[int, int], shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    core = Harness.with_worker(prefix_cache=False, max_rows=4, step_tokens=32)
    load = Load(core, dict(zip("ab", weights, strict=True)), dict(zip("ab", shapes, strict=True)))
    for _ in range(1500):
        load.step(depth=8)
    ratio = load.served["b"] / load.served["a"] * weights[0] / weights[1]
    assert 0.85 < ratio < 1.15, load.served


def test_a_flood_of_one_does_not_keep_another_waiting() -> None:
    core = Harness.with_worker(max_rows=2, prefix_cache=False)
    for _ in range(50):
        core.send(owned(core, "flood"))
    small = owned(core, "small")
    core.send(small)
    order = [added.seq_id for plan in core.plans for added in plan.added]
    while small.seq_id not in core.finished:
        order += [added.seq_id for added in core.plans[-1].added]
        core.answer()
    assert len(dict.fromkeys(order)) <= 5, "small came after the rows that ran already"


def test_a_tenant_alone_gets_everything() -> None:
    core = Harness.with_worker(max_rows=4)
    core.send(*[owned(core, "a") for _ in range(4)])
    assert core.core.load().running == 4


def test_a_level_of_priority_is_worth_its_time_of_waiting() -> None:
    core = Harness.with_worker(max_rows=1, priority_ageing_s=10.0)
    core.admit(ids(3), max_tokens=30)
    early = core.admit(ids(3, 20), priority=2)  # the harness's clock runs a second a call
    soon = core.admit(ids(3, 30), priority=0)
    core.now_s += 25
    late = core.admit(ids(3, 40), priority=0)
    core.run()
    assert list(core.finished)[1:] == [soon, early, late]


def test_without_ageing_priorities_are_absolute() -> None:
    core = Harness.with_worker(max_rows=1, priority_ageing_s=0.0)
    core.admit(ids(3), max_tokens=30)
    early = core.admit(ids(3, 20), priority=1)
    core.now_s += 10_000
    late = core.admit(ids(3, 40), priority=0)
    core.run()
    assert list(core.finished)[1:] == [late, early]


def test_priorities_do_not_reach_across_tenants() -> None:
    core = Harness.with_worker(max_rows=1, prefix_cache=False)
    core.admit(ids(3), max_tokens=20)
    urgent = [owned(core, "urgent", priority=-100) for _ in range(3)]
    plain = owned(core, "plain")
    core.send(*urgent, plain)
    core.run()
    assert list(core.finished).index(plain.seq_id) == 2


def test_who_was_served_most_gives_its_blocks_up() -> None:
    """Though it came first, and is the more urgent."""
    core = Harness.with_worker(blocks=5, max_len=20, prefix_cache=False)
    rich, poor = owned(core, "rich", 1, 7, max_tokens=12), owned(core, "poor", 4, 7, max_tokens=12)
    core.send(rich, poor)
    core.run()
    assert core.core.metrics()["preemptions"] >= 1
    assert "preempted" in "\n".join(core.core.story(rich.seq_id))
    assert "preempted" not in "\n".join(core.core.story(poor.seq_id))
    assert core.tokens[rich.seq_id] == core.tokens[poor.seq_id] == [PLAIN] * 12 and core.all_free()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(-2, 2), st.integers(1, 12)),
        min_size=3,
        max_size=14,
    )
)
def test_nobody_yields_to_who_would_be_served_later(requests: list[tuple[str, int, int, int]]) -> None:
    core = Harness.with_worker(blocks=7, max_len=24, prefix_cache=False)
    state = core.core._state
    preempt, seen = state.preempt, []

    def watched(row: object, why: str) -> None:
        assert state.worker is not None
        rows = [other for other in state.worker.rows.by_slot if other is not None]
        last = max((other for other in rows if other.sequence.stage is not Stage.ENDING), key=state.rank)
        seen.append((row, last))
        preempt(row, why)  # type: ignore[arg-type]

    state.preempt = watched  # type: ignore[method-assign,assignment]
    for tenant, weight, priority, tokens in requests:
        core.send(owned(core, tenant, weight, tokens, priority, max_tokens=10))
    core.run()
    assert all(victim is last for victim, last in seen)
    assert len(core.finished) == len(requests) and core.all_free()


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting_tokens=25)
    core.admit(ids(3), max_tokens=40)
    fits = core.message(ids(20), n=3)
    core.send(fits)
    assert core.core.load().waiting_tokens == 22  # choices share their prompt
    refused = core.admit(ids(5))
    assert [(each.seq_id, each.reason) for each in core.refused] == [(refused, "overloaded")]
    assert "22 prompt tokens wait" in core.refused[0].message
    core.admit(ids(3))
    core.run()
    assert core.core.load().waiting_tokens == 0
    core.admit(ids(3), max_tokens=40)
    core.admit(ids(30))  # nobody else waits
    assert len(core.refused) == 1


def test_what_was_accepted_before_is_not_refused_for_load() -> None:
    core = Harness.with_worker(max_rows=1, max_waiting=2, max_waiting_tokens=10)
    core.admit(ids(3), max_tokens=40)
    core.send(*[core.message(ids(4)) for _ in range(2)])
    again = [msgspec.structs.replace(core.message(ids(9)), again=True) for _ in range(3)]
    core.send(*again)
    assert core.refused == [] and core.core.load().waiting == 5


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

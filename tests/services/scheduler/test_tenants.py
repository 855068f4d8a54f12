"""What tenants were served, who is remembered, and what follows from it through the whole core."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol import Admit
from services.scheduler.request import Stage
from services.scheduler.tenants import IDLE_KEPT, Tenant, Tenants
from tests.services.scheduler.harness import PLAIN, Harness, ids


def test_weight_divides_what_is_charged() -> None:
    tenant = Tenant("a", 1)
    tenant.weigh(0, 4)
    tenant.charge(100)
    assert tenant.virtual(0) == 25


def test_a_lift_never_lowers() -> None:
    tenant = Tenant("a", 1)
    tenant.lift(0, 10.0)
    tenant.lift(0, 5.0)
    assert tenant.virtual(0) == 10


def test_ticks_may_begin_anew_with_a_new_worker() -> None:
    tenant = Tenant("a", 1)
    tenant.step(1000, 1)
    tenant.step(1010, -1)
    tenant.step(0, 2)
    assert (tenant.virtual(0), tenant.virtual(5)) == (10, 20)


def test_a_tenant_is_remembered_when_it_has_nothing_open() -> None:
    tenants = Tenants(lambda: 0)
    first = tenants.open("a", 1)
    assert tenants.open("a", 3) is first and first.weight == 3
    first.charge(30)
    tenants.close(first)
    tenants.close(first)
    assert len(tenants) == 0
    again = tenants.open("a", 1)
    assert again is first and again.virtual(0) == 10


def test_names_do_not_pile_up() -> None:
    tenants = Tenants(lambda: 0)
    first = tenants.open("first", 1)
    tenants.close(first)
    for number in range(IDLE_KEPT):
        tenants.close(tenants.open(f"t{number}", 1))
    assert tenants.open("first", 1) is not first and len(tenants) == 1


def test_nonsense_weights_are_one() -> None:
    assert Tenants(lambda: 0).open("a", -5).weight == 1


def test_the_least_served_is_first_then_the_elder_then_the_key() -> None:
    tenants = Tenants(lambda: 0)
    one, two = tenants.open("a", 1), tenants.open("b", 1)
    assert tenants.rank(one, (5, 9)) < tenants.rank(two, (0, 0))
    one.charge(1)
    assert tenants.rank(two, (5, 9)) < tenants.rank(one, (0, 0))
    assert tenants.rank(two, (0, 3)) < tenants.rank(two, (1, 2))


def test_check_counts() -> None:
    tenant = Tenant("a", 1)
    tenant.check([], 0, 0)
    tenant.step(0, 1)
    with pytest.raises(AssertionError, match="rows that step"):
        tenant.check([], 0, 0)


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

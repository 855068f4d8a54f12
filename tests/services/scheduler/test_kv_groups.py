"""Tables of all kinds: what plans say of them, and their invariants in any order of calls."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.columns import pack_i32, unpack_i32
from common.kv_needs import first_block, needs, window_blocks
from common.protocol import Copies, KvGroup, ModelFacts, StepPlan, StepResult
from services.scheduler.blocks import chain_root
from services.scheduler.kv_groups import KvGroups
from services.scheduler.request import Row
from tests.services.scheduler.harness import Harness, ids

FULL, WINDOW, STATE = KvGroup("full"), KvGroup("window", window=6), KvGroup("state", 1, every=8)


def serving(*groups: KvGroup, blocks: int = 40, states: int = 6, **limits: Any) -> Harness:
    """Blocks of 4 tokens."""
    harness = Harness(blocks=blocks, **limits)
    pools = (states,) if any(group.pool for group in groups) else ()
    harness.facts = msgspec.structs.replace(harness.facts, groups=groups, pools=pools)
    harness.ready()
    assert not harness.faults
    return harness


def kv(harness: Harness) -> KvGroups:
    worker = harness.core.state.worker
    assert worker is not None
    return worker.kv


def row_of(harness: Harness, seq_id: int) -> Row:
    row = harness.core.state.sequences[seq_id].row
    assert row is not None
    return row


def test_a_plan_for_one_full_group_says_nothing_new() -> None:
    harness = Harness.with_worker()
    harness.admit(ids(9))
    harness.answer()
    for plan in harness.plans:
        assert (plan.grown, plan.copies) == ((), ()) and all(row.tables == () for row in plan.added)


def test_a_window_keeps_what_the_next_token_reads_and_a_few_blocks_at_most() -> None:
    harness = serving(FULL, WINDOW, step_tokens=8, plans_in_flight=1)
    seq_id = harness.admit(ids(30), max_tokens=30)
    first = harness.plans[0]
    (added,) = first.added
    assert len(unpack_i32(added.blocks)) == 8 and len(unpack_i32(added.tables[0].blocks)) == 0, "chunk by chunk"
    assert [len(unpack_i32(growth.blocks)) for growth in first.grown] == [2]
    most = 0
    while seq_id not in harness.finished:
        row = row_of(harness, seq_id)
        assert row.tables[0].first == 0
        most = max(most, len(row.tables[1].blocks))
        harness.answer()
    assert most == 4 < window_blocks(6, 8, 4) and harness.all_free()


def test_a_prompt_longer_than_its_pool_runs_in_small_chunks() -> None:
    """13 blocks hold the 12 that the full group needs in the end and hardly a window."""
    least = needs((FULL, WINDOW), 1, 40, 4)[0]
    assert least == 14
    harness = serving(FULL, WINDOW, blocks=least, step_tokens=64, plans_in_flight=1)
    seq_id = harness.admit(ids(36), max_tokens=4)
    chunks = []
    while seq_id not in harness.finished:
        chunks += unpack_i32(harness.plans[0].counts).tolist()
        harness.answer()
    assert sum(chunks) == 39 and 1 < len(chunks) - 3 < 10, chunks


def test_a_row_that_fills_takes_blocks_from_less_urgent_ones_that_fill() -> None:
    harness = serving(FULL, WINDOW, blocks=26, max_len=40, step_tokens=12, plans_in_flight=1)
    late = harness.admit(ids(24), max_tokens=4)
    soon = harness.admit(ids(30, 50), max_tokens=4, priority=-1)
    harness.run()
    assert set(harness.finished) == {late, soon} and harness.all_free()


def test_checkpoints_are_copied_before_the_step_that_goes_on_and_found_by_others() -> None:
    harness = serving(FULL, STATE, step_tokens=64, plans_in_flight=1)
    prompt = ids(21)
    first = harness.admit(prompt, max_tokens=2)
    (live,) = unpack_i32(harness.plans[0].added[0].tables[0].blocks)
    seen: list[tuple[int, tuple[Copies, ...]]] = []
    while harness.plans:
        seen.append((unpack_i32(harness.plans[0].counts)[0], harness.plans[0].copies))
        harness.answer()
    assert [count for count, _ in seen] == [8, 8, 5, 1], "no chunk crosses a checkpoint"
    targets = [unpack_i32(copies[0].target)[0] for _, copies in seen[1:3]]
    assert [copies for _, copies in seen] == [
        (),
        *((Copies(1, pack_i32([live]), pack_i32([target])),) for target in targets),
        (),
    ]
    assert first in harness.finished and harness.all_free()
    harness.admit(prompt, max_tokens=2)
    (added,) = harness.plans[0].added
    (begins,) = unpack_i32(added.tables[0].blocks)
    assert added.computed == 16 and begins not in targets
    assert harness.plans[0].copies == (Copies(1, pack_i32([targets[1]]), pack_i32([begins])),)
    harness.run()
    again = harness.admit([*prompt[:15], 99, 98], max_tokens=2)
    assert harness.plans[0].added[0].computed == 8, "three full blocks are there, but the state of two"
    harness.run()
    assert harness.finished[again].cached_tokens == 8


def test_a_checkpoint_of_an_output_is_found() -> None:
    harness = serving(FULL, STATE, plans_in_flight=2)
    seq_id = harness.admit(ids(5), max_tokens=24)
    harness.run()
    prompt = [*ids(5), *harness.tokens[seq_id]]
    harness.admit(prompt, max_tokens=1)
    assert harness.plans[0].added[0].computed == 24


def test_no_checkpoint_is_made_where_rows_need_the_blocks() -> None:
    harness = serving(FULL, STATE, states=2, step_tokens=64, plans_in_flight=1)
    harness.send(harness.message(ids(21), max_tokens=4), harness.message(ids(21, 40), max_tokens=4))
    copies = []
    while harness.plans:
        copies += [plan.copies for plan in harness.plans]
        harness.answer()
    assert len(harness.finished) == 2 and not any(copies)


def test_a_plan_does_not_take_the_checkpoint_that_it_copies() -> None:
    """Three blocks: two checkpoints and one for a live state, where two rows want to go on from the checkpoints."""
    harness = serving(FULL, STATE, states=3, step_tokens=64, plans_in_flight=1)
    prompts = ids(12), ids(12, 40)
    for prompt in prompts:
        harness.admit(prompt, max_tokens=1)
        harness.run()
    harness.send(*(harness.message(prompt, max_tokens=3) for prompt in prompts))
    starts = []
    while harness.plans:
        (plan,) = harness.plans
        starts.append([row.computed for row in plan.added])
        for copies in plan.copies:
            assert not set(unpack_i32(copies.source)) & set(unpack_i32(copies.target))
        harness.answer()
    assert starts[0] == [8], "the other one has to wait"
    assert len(harness.finished) == 4 and harness.all_free()


def test_a_failed_step_takes_its_checkpoints_with_it() -> None:
    harness = serving(FULL, STATE, step_tokens=8, plans_in_flight=2)
    harness.admit(ids(21), max_tokens=2)
    assert harness.plans[1].copies, "of the state behind the first chunk"
    harness.send(StepResult(harness.plans.pop(0).step, b"", error="the device is ill"))
    harness.answer()
    harness.admit(ids(21), max_tokens=2)
    assert harness.plans[0].added[0].computed == 0
    harness.run()


def test_siblings_share_a_window_and_copy_the_last_page_of_each_group() -> None:
    harness = serving(FULL, WINDOW, plans_in_flight=1)
    harness.admit(ids(10), n=2, max_tokens=6)
    harness.answer()
    (plan,) = harness.plans
    (added,) = plan.added
    assert added.computed == 9 and (added.first, added.tables[0].first) == (0, 1)
    assert len(unpack_i32(plan.copy_source)) == 2, "the full group's third page, and the window's"
    harness.run()
    assert harness.all_free()


def test_siblings_of_a_recurrent_model_wait_for_a_checkpoint() -> None:
    harness = serving(FULL, STATE, plans_in_flight=1)
    harness.admit(ids(18), n=2, max_tokens=6)
    starts: list[int] = []
    while harness.plans:
        starts += [row.computed for row in harness.plans[0].added]
        harness.answer()
    assert starts == [0, 16] and harness.all_free()


def tokens_of(kind: int, count: int) -> bytearray:
    return bytearray(pack_i32([kind, *range(3, 60)][:count]))


KINDS = st.one_of(
    st.just(FULL),
    st.integers(1, 20).map(lambda window: KvGroup("window", window=window)),
    st.integers(1, 2).map(lambda blocks: KvGroup("state", every=4 * blocks)),
)


@given(st.data())
def test_any_order_of_calls_keeps_the_invariants(data: st.DataObject) -> None:
    """Rows are admitted, computed in chunks and left, over pools that all kinds of groups share or do not."""
    first = data.draw(st.sampled_from((FULL, KvGroup("window", window=7))))
    others = data.draw(st.lists(KINDS, max_size=3))
    groups = [first, *(msgspec.structs.replace(group, pool=data.draw(st.integers(0, 1))) for group in others)]
    count = 1 + max(group.pool for group in groups)
    blocks = [need + data.draw(st.integers(0, 20)) for need in needs(groups, count, 48, 4)]
    facts = ModelFacts("m", "a", 100, 48, (), 4, blocks[0], groups=tuple(groups), pools=tuple(blocks[1:]))
    kv, rows = KvGroups(facts, 1, 16), cast(list[Any], [])
    for call, number in data.draw(
        st.lists(st.tuples(st.sampled_from(["admit", "chunk", "chunk", "leave"]), st.integers(0, 9)))
    ):
        if call == "admit":
            tokens, chain = tokens_of(number % 2, 21 + 3 * number), []
            sequence = SimpleNamespace(tokens=tokens, chain=chain, request=SimpleNamespace(root=chain_root("", 1)))
            known = len(tokens) // 4
            hit = kv.prefixes.match(tokens, (known - 1) // 4, sequence.request.root, chain)
            if kv.may_admit(hit, known, len(rows)):
                tables, start = kv.take(hit, known), 4 * hit.num_blocks
                rows.append(Row(cast(Any, sequence), len(rows), tables[0].blocks, start, start // 4, tables=tables))
        elif rows and call == "leave":
            kv.release(rows.pop(number % len(rows)))
        elif rows:
            row = rows[number % len(rows)]
            known = len(row.sequence.tokens) // 4
            size = kv.room(row, min(known - row.scheduled, 16))
            if size > 0:
                kv.advance(row, size)
                kv.save(row, row.scheduled)
                row.scheduled += size
                new, row.published = row.published, max(row.scheduled // 4, row.published)
                labels = kv.publish(row, new, row.published)
                if number == 9:
                    kv.withdraw(labels)
        kv.drain()
        kv.check(rows)
        for row in rows:
            for group, table in zip(groups, row.tables, strict=True):
                if group.kind == "window":
                    assert table.first <= first_block(group, row.scheduled, 4) and table.end == -(-row.scheduled // 4)
                    assert len(table.blocks) <= window_blocks(group.window, 16, 4)
    for row in rows:
        kv.release(row)
    kv.check([])
    assert [pool.free_blocks for pool in kv.pools] == blocks


@pytest.mark.parametrize(
    ("groups", "pools"),
    [
        ((KvGroup("state", every=8),), ()),
        ((FULL, KvGroup("window", window=0)), ()),
        ((FULL, KvGroup("state", 1, every=6)), (5,)),
        ((FULL, KvGroup("full", 2)), (5, 5)),
        ((FULL, KvGroup("full", -1)), ()),
        ((KvGroup("full", 1), FULL), (5,)),
        ((FULL,) * 65, ()),
        ((FULL, KvGroup("state", 1, every=8)), (1,)),
        ((FULL,), (5,)),
        ((FULL, KvGroup("full", 1)), (0,)),
    ],
)
def test_groups_that_cannot_be_are_a_fault_of_the_worker(groups: tuple[KvGroup, ...], pools: tuple[int, ...]) -> None:
    harness = Harness()
    harness.facts = msgspec.structs.replace(harness.facts, groups=groups, pools=pools)
    harness.ready()
    assert len(harness.faults) == 1 and "can run nothing" in harness.faults[0]


def test_a_plan_with_groups_survives_the_wire() -> None:
    harness = serving(FULL, WINDOW, STATE, step_tokens=8)
    harness.admit(ids(21))
    for plan in harness.plans:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan

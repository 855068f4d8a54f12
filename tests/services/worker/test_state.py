from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.columns import pack_i32
from common.protocol import Growth, KvGroup, RowStart, RowTable, Sampling, StepPlan
from services.worker.memory import Shape
from services.worker.state import Rows

GREEDY = Sampling(max_tokens=8, temperature=0.0)


def make_rows() -> Rows:
    return Rows(Shape(4, 32, 8), 50, (2,), torch.device("cpu"))


def start(slot: int, tokens: list[int], blocks: list[int], sampling: Sampling = GREEDY, **changes: int) -> RowStart:
    known = {"num_prompt": len(tokens), "computed": 0} | changes
    return RowStart(slot, slot, pack_i32(tokens), known["num_prompt"], known["computed"], pack_i32(blocks), sampling)


def plan(work: list[tuple[int, int, int, int]] | None = None, **changes: Any) -> StepPlan:
    columns = list(zip(*work, strict=True)) if work else [(), (), (), ()]
    return StepPlan(
        7,
        slots=pack_i32(columns[0]),
        positions=pack_i32(columns[1]),
        counts=pack_i32(columns[2]),
        samples=bytes(columns[3]),
        **changes,
    )


def commit(rows: Rows, step: Any, tokens: list[int]) -> None:
    """What the runner does after a step: the new ids are in their rows before they are counted."""
    slots = step.slots[step.samples]
    sampled = torch.tensor(tokens, dtype=torch.int32)
    rows.tokens[slots, (step.positions + step.counts)[step.samples]] = sampled
    rows.commit(step)


def test_a_row_lives_from_added_to_removed() -> None:
    rows = make_rows()
    step = rows.apply(plan([(1, 0, 3, 0)], added=[start(1, [5, 6, 7, 8], [3])]))
    commit(rows, step, [])
    assert rows.live.tolist() == [False, True, False, False]
    assert (rows.length[1], rows.computed[1]) == (4, 3)
    commit(rows, rows.apply(plan([(1, 3, 1, 1)])), [9])
    assert rows.tokens[1, :5].tolist() == [5, 6, 7, 8, 9] and rows.length[1] == 5
    rows.apply(plan(removed=pack_i32([1]), added=[start(1, [4], [0])]))
    assert rows.length[1] == 1 and rows.computed[1] == 0
    rows.reset()
    assert not rows.live.any()


def test_blocks_are_appended_in_order() -> None:
    rows = make_rows()
    rows.apply(
        plan(
            added=[start(0, [1] * 9, [7]), start(2, [1], [])],
            grown_slots=pack_i32([0, 2, 0]),
            grown_blocks=pack_i32([4, 5, 6]),
        )
    )
    assert rows.tables[0, :3].tolist() == [7, 4, 6] and rows.tables[2, 0] == 5
    assert rows.first.num_blocks.tolist() == [3, 0, 1, 0]


def test_a_plan_that_does_not_fit_is_a_broken_invariant() -> None:
    good = start(0, [1] * 9, [3, 4])
    for text, wrong in (
        ("holds no row", plan(removed=pack_i32([0]))),
        ("holds no row", plan([(1, 0, 1, 0)])),
        ("taken twice", plan(added=[good, good])),
        ("positions", plan([(0, 1, 3, 0)], added=[good])),
        ("does not have", plan([(0, 0, 10, 0)], added=[good])),
        ("lacks blocks", plan([(0, 0, 9, 0)], added=[start(0, [1] * 9, [3])])),
        ("before its end", plan([(0, 0, 8, 1)], added=[good])),
        ("without tokens", plan([(0, 0, 0, 0)], added=[good])),
        ("two rows", plan([(0, 0, 1, 0), (0, 1, 1, 0)], added=[good])),
        ("vocabulary", plan(added=[start(0, [50], [3])])),
        ("vocabulary", plan(added=[start(0, [-1], [3])])),
        (r"\(0, 0, 32\)", plan(added=[start(0, [], [3])])),
        (r"\(1, 1\)", plan(added=[start(0, [1], [3], computed=1)])),
        (r"\(33, 33, 32\)", plan(added=[start(0, [1] * 33, [3])])),
    ):
        with pytest.raises(AssertionError, match=text):
            make_rows().apply(wrong)


def test_sampling_columns() -> None:
    rows = make_rows()
    odd = Sampling(8, seed=2**64 - 3, temperature=0.5, top_p=0.9, top_k=99, min_p=0.1, min_tokens=4)
    rows.apply(plan(added=[start(0, [1], [0], odd), start(1, [1], [1], Sampling(8, top_k=-1))]))
    columns = rows.sampling[0]
    assert columns["seed"] == -3 and columns["min_tokens"] == 4
    assert columns["temperature"] == np.float32(0.5) and columns["top_p"] == np.float32(0.9)
    assert rows.sampling["top_k"].tolist()[:2] == [0, 0], "as many as there are tokens, or fewer than one, is off"


def test_edits_leave_out_what_is_not_a_token() -> None:
    rows = make_rows()
    sampling = Sampling(8, logit_bias=((3, 1.5), (50, 9.0), (-1, 9.0)), min_tokens=2, stop_token_ids=(7, 7, 99))
    rows.apply(plan(added=[start(0, [1], [0], sampling), start(1, [1], [1])]))
    assert list(rows.edits) == [0]
    edits = rows.edits[0]
    assert edits.bias_ids.tolist() == [3] and edits.bias_values.tolist() == [1.5] and edits.end_ids.tolist() == [7, 2]
    rows.apply(plan(removed=pack_i32([0])))
    assert not rows.edits


def test_ignored_eos_may_come_early() -> None:
    rows = make_rows()
    rows.apply(plan(added=[start(0, [1], [0], Sampling(8, min_tokens=2, ignore_eos=True))]))
    assert not rows.edits


def test_penalty_counts_only_when_needed_and_rebuilt_on_readmission() -> None:
    rows = make_rows()
    rows.apply(plan(added=[start(0, [1], [0])]))
    assert rows.penalties is None
    sampling = Sampling(8, temperature=0.0, frequency_penalty=0.5)
    step = rows.apply(plan([(3, 0, 5, 1)], added=[start(3, [4, 5, 6, 6, 4], [1], sampling, num_prompt=2)]))
    assert rows.penalties is not None
    assert rows.penalties.in_prompt[3].nonzero().flatten().tolist() == [4, 5]
    assert rows.penalties.in_output[3].nonzero().flatten().tolist() == [4, 6]
    commit(rows, step, [6])
    assert rows.penalties.in_output[3, [4, 5, 6]].tolist() == [1, 0, 3]
    rows.apply(plan(removed=pack_i32([3]), added=[start(3, [8], [1], sampling)]))
    assert rows.penalties.in_output[3].sum() == 0
    assert rows.penalties.in_prompt[3].nonzero().flatten().tolist() == [8]


def test_a_full_row_may_draw_one_token_that_nobody_runs() -> None:
    rows = make_rows()
    step = rows.apply(plan([(0, 0, 32, 1)], added=[start(0, [1] * 32, [0, 1, 2, 3]), start(1, [9], [4])]))
    commit(rows, step, [6])
    assert rows.length[0] == 33 and rows.tokens[1, 0] == 9


def test_plain_rows_need_no_more_than_a_temperature() -> None:
    rows = make_rows()
    samplings = [
        Sampling(8),
        Sampling(8, temperature=0.0, top_k=5, top_p=0.1),
        Sampling(8, top_k=5),
        Sampling(8, temperature=0.0, presence_penalty=1.0),
    ]
    rows.apply(plan(added=[start(slot, [1], [slot], sampling) for slot, sampling in enumerate(samplings)]))
    assert rows.is_plain.tolist() == [True, True, False, False]


def test_a_device_gets_the_tables_of_new_rows() -> None:
    rows = make_rows()
    rows.first.resident = torch.zeros(5, 4, dtype=torch.int32)
    rows.apply(plan(added=[start(2, [1, 2], [7, 8]), start(0, [3], [6])]))
    assert rows.resident[[0, 2]].tolist() == [[6, 0, 0, 0], [7, 8, 0, 0]]
    assert rows.tokens[2, :2].tolist() == [1, 2] and rows.tokens[0, 0] == 3


def test_groups_have_tables_of_their_own() -> None:
    groups = (KvGroup("window", window=4), KvGroup("full", 1), KvGroup("state", 2, every=8))
    rows = Rows(Shape(4, 32, 8), 50, (2,), torch.device("cpu"), groups)
    row = start(1, list(range(20)), [5], computed=16)
    tables = RowTable(0, pack_i32([7, 8])), RowTable(0, pack_i32([3]))
    changed = msgspec.structs.replace(row, first=1, tables=tables)
    grown = {"grown_slots": pack_i32([1]), "grown_blocks": pack_i32([6])}
    with pytest.raises(AssertionError, match="a row lacks blocks"):
        rows.apply(plan([(1, 16, 4, 1)], added=[changed], **grown))
    rows.reset()
    more = (Growth(1, pack_i32([1]), pack_i32([9])),)
    rows.apply(plan([(1, 16, 4, 1)], added=[changed], grown=more, **grown))
    full, state = rows.beside
    assert rows.tables[1].tolist() == [0, 5, 6, 0] and full.tables[1].tolist() == [7, 8, 9, 0]
    assert state.tables.shape == (4, 1) and state.tables[1, 0] == 3 and state.is_state
    assert (rows.first.num_blocks[1], full.num_blocks[1]) == (3, 3)

"""Plans of the start: they fit the rows and a small cache, are as large as the scheduler's, and run every kind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.columns import unpack_i32
from common.protocol import StepPlan
from services.worker.graphs import GraphKey, layouts
from services.worker.memory import Shape
from services.worker.warmup import (
    MANNERS,
    REPORTED,
    VECTORS,
    Sizes,
    all_kinds,
    captured_steps,
    decode_step,
    first_steps,
    largest_steps,
    reporting,
)

SIZES = [
    Sizes(Shape(4, 100, 16), 64, 0),
    Sizes(Shape(40, 200, 8), 30, 12),
    Sizes(Shape(1, 20, 4), 500, 0),
    Sizes(Shape(3, 4, 16), 1, 0),
]


def checked(plan: StepPlan, sizes: Sizes) -> np.ndarray:
    """The counts, after a look at what a worker would assert."""
    counts, positions = np.frombuffer(plan.counts, np.int32), np.frombuffer(plan.positions, np.int32)
    assert 0 < counts.sum() <= sizes.step_tokens and len(counts) <= sizes.shape.max_rows
    assert counts.max() <= sizes.longest
    for row, position, count, samples in zip(plan.added, positions, counts, plan.samples, strict=True):
        blocks = unpack_i32(row.blocks).tolist()
        assert row.computed == position >= 0
        length = len(row.tokens) // 4
        assert (length == position + count) if samples else (length > position + count)
        assert length < sizes.shape.max_len + 1
        assert len(blocks) * sizes.shape.block_tokens >= position + count and max(blocks) < sizes.num_blocks
        written = blocks[position // sizes.shape.block_tokens : (position + count - 1) // sizes.shape.block_tokens + 1]
        assert len(set(written)) == len(written), "two tokens of a row share a place"
    return counts


@pytest.mark.parametrize("sizes", SIZES)
def test_all_plans_are_possible(sizes: Sizes) -> None:
    sizes = sizes._replace(vectors=True)
    plans = (*largest_steps(sizes), *all_kinds(sizes), *reporting(sizes), *first_steps(sizes), decode_step(sizes, 1))
    for plan in plans:
        checked(plan, sizes)
    assert {row.sampling for plan in plans for row in plan.added} == {*MANNERS, *VECTORS, REPORTED}


def test_the_largest_steps_use_the_whole_budget() -> None:
    many, many_drawn, long = largest_steps(SIZES[0])
    for plan in (many, many_drawn):
        assert checked(plan, SIZES[0]).tolist() == [16] * 4 and plan.samples == b"\1" * 4
    assert checked(long, SIZES[0]).tolist() == [64] and unpack_i32(long.positions).tolist() == [35]
    assert {row.sampling for row in many.added} == {MANNERS[0]} and many_drawn.added[0].sampling is MANNERS[-1]


def test_every_manner_of_sampling_and_every_number_of_outputs_is_there() -> None:
    plans = list(all_kinds(SIZES[1]))
    assert {row.sampling for plan in plans for row in plan.added} == set(MANNERS)
    kinds: set[tuple[Any, ...]] = {
        (min(int(np.frombuffer(plan.counts, np.int32).sum()), 2), min(plan.samples.count(1), 2)) for plan in plans
    }
    assert kinds == {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


def test_no_step_after_a_start_asks_for_another_kernel(tmp_path: Path) -> None:
    """Whatever is asked of its rows (late_kernels.py has an example for each field), and of whatever size it is."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.services.worker.late_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    starts = [line.split()[1] for line in done.stdout.splitlines() if not line.startswith("late:")]
    assert len(starts) == 2 and all(int(count) > 40 for count in starts), "the program does not see kernels"
    assert "late:" not in done.stdout, done.stdout


def test_captured_layouts_are_measured_by_their_largest_steps() -> None:
    sizes = Sizes(Shape(4, 20_000, 16), 600, 0)
    plans = list(captured_steps(sizes, layouts(4, 4, 600, 20_000)))
    assert [checked(plan, sizes).tolist() for plan in plans] == [[1] * 4, [1] * 3 + [512], [1] * 3 + [512]]
    assert [int(np.frombuffer(plan.positions, np.int32)[-1]) for plan in plans] == [511, 0, 20_000 - 1 - 512]
    # a graph scores as many positions of each row as the longest may have
    assert unpack_i32(plans[0].positions).tolist() == [20_000 - 2, 511, 511, 511]
    assert len(list(captured_steps(sizes, [GraphKey(2), GraphKey(4)]))) == 1


def test_steps_with_drafts_are_run_and_measured_where_there_are_drafts() -> None:
    sizes = SIZES[0]._replace(drafts=3, draft_rows=5)
    assert sizes.most_drafting == 4 and sizes.most_entries == 16
    assert sizes._replace(step_tokens=9).most_drafting == 2, "the budget of a step bounds them"
    kept = [plan for plan in largest_steps(sizes) if plan.drafting]
    assert len(kept) == 2 and {plan.drafting for plan in all_kinds(sizes) if plan.drafting} == {1, 4}
    for plan in kept:
        assert unpack_i32(plan.counts).tolist() == [4] * 4 and plan.samples == b"\1" * 4
        for row, position in zip(plan.added, unpack_i32(plan.positions), strict=True):
            assert len(row.tokens) // 4 == position + 1, "the newest token is known, the drafts are not"
            assert len(row.blocks) // 4 * sizes.shape.block_tokens >= position + 4
    assert not any(plan.drafting for plan in (*largest_steps(SIZES[0]), *all_kinds(SIZES[0])))
    captured = list(captured_steps(sizes, [GraphKey(16), GraphKey(4)]))
    assert [plan.drafting for plan in captured] == [0, 4]


def test_first_steps_stay_in_the_smallest_pool() -> None:
    """A prompt as long as it holds: tokens of one step never share a place."""
    sizes = SIZES[0]._replace(fewest=2)
    for plan in first_steps(sizes):
        for row in plan.added:
            blocks = unpack_i32(row.blocks).tolist()
            assert max(blocks) < 2
            written = range(row.computed // sizes.shape.block_tokens, len(blocks))
            assert len({blocks[idx] for idx in written}) == len(written)

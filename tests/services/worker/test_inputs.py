from typing import Any

import pytest
import torch

from common.columns import pack_i32
from common.protocol import RowStart, Sampling, StepPlan
from services.worker import inputs
from services.worker.inputs import ForwardBatch, SamplingBatch
from services.worker.memory import Shape
from services.worker.state import Rows, Step


def prepare(samplings: list[Sampling], lengths: list[int], work: list[tuple[int, int, int, int]]) -> tuple[Rows, Step]:
    """Slot i holds lengths[i] tokens (two of the prompt) in blocks 10 * i ...; `work` as in a plan."""
    rows = Rows(Shape(8, 64, 4), 50, (2,), torch.device("cpu"))
    added = [
        RowStart(
            slot,
            slot,
            pack_i32(range(length)),
            min(2, length),
            next((position for s, position, _, _ in work if s == slot), 0),
            pack_i32(range(10 * slot, 10 * slot + -(-length // 4))),
            sampling,
        )
        for slot, (sampling, length) in enumerate(zip(samplings, lengths, strict=True))
    ]
    slots, positions, counts, samples = zip(*work, strict=True)
    plan = StepPlan(
        1,
        added=added,
        slots=pack_i32(slots),
        positions=pack_i32(positions),
        counts=pack_i32(counts),
        samples=bytes(samples),
    )
    return rows, rows.apply(plan)


GREEDY = Sampling(8, temperature=0.0)


def build(samplings: list[Sampling], lengths: list[int], work: list[tuple[int, int, int, int]]) -> ForwardBatch:
    rows, step = prepare(samplings, lengths, work)
    return inputs.build(step, rows, torch.from_numpy)


def sampling_of(
    samplings: list[Sampling], lengths: list[int], work: list[tuple[int, int, int, int]]
) -> SamplingBatch | None:
    rows, step = prepare(samplings, lengths, work)
    slots, context = step.slots[step.samples], (step.positions + step.counts)[step.samples]
    return inputs.sampling_batch(slots, context, rows, torch.from_numpy) if len(slots) else None


def test_mixed_rows() -> None:
    batch = build([GREEDY] * 3, [7, 20, 9], [(2, 8, 1, 1), (0, 2, 3, 0), (1, 15, 5, 1)])
    assert batch.positions.tolist() == [8, 2, 3, 4, 15, 16, 17, 18, 19]
    assert batch.token_places.tolist() == [138, 2, 3, 4, 80, 81, 82, 83, 84]
    assert batch.kv_slots.tolist() == [88, 2, 3, 4, 55, 56, 57, 58, 59]
    assert batch.rows.query_starts.tolist() == [0, 1, 4, 9]
    assert batch.rows.context_lens.tolist() == [9, 5, 20]
    assert batch.rows.block_tables[2].tolist() == [10, 11, 12, 13, 14]
    assert (batch.rows.max_query, batch.rows.max_context) == (5, 20)
    assert batch.outputs is not None and batch.outputs.tolist() == [0, 8]
    assert batch.sampled_places.tolist() == [139, 85]
    assert batch.token_rows.tolist() == [2, 0, 0, 0, 1, 1, 1, 1, 1] and batch.rows.num_decode == 1


def test_greedy_rows_need_no_parameters() -> None:
    assert sampling_of([GREEDY] * 2, [7, 9], [(0, 6, 1, 1), (1, 8, 1, 1)]) is None


def test_decode_rows_are_all_sampled_from() -> None:
    batch = build([GREEDY] * 2, [3, 8], [(1, 7, 1, 1), (0, 2, 1, 1)])
    assert batch.outputs is None and batch.kv_slots.tolist() == [47, 2] and batch.rows.max_query == 1
    assert batch.rows.num_decode == 2
    assert all(column.dtype == torch.int64 for column in (batch.token_places, batch.positions, batch.kv_slots))
    assert batch.rows.block_tables.dtype == batch.rows.context_lens.dtype == torch.int32


def test_a_step_may_sample_nothing() -> None:
    batch = build([Sampling(8)], [9], [(0, 0, 4, 0)])
    assert batch.outputs is not None and len(batch.outputs) == 0 and len(batch.sampled_places) == 0


def test_only_rows_that_need_it_are_in_each_part() -> None:
    samplings = [
        Sampling(8, seed=11),
        GREEDY,
        Sampling(8, seed=12, top_k=5, top_p=0.5),
        Sampling(8, seed=13, top_p=0.9, temperature=0.7),
        Sampling(8, temperature=0.0, presence_penalty=1.0),
    ]
    work = [(4, 5, 1, 1), (3, 2, 1, 1), (2, 0, 3, 1), (1, 0, 1, 0), (0, 6, 1, 1)]
    sampling = sampling_of(samplings, [7, 5, 3, 3, 6], work)
    assert sampling is not None and sampling.edits is None
    draw, penalties = sampling.draw, sampling.penalties
    assert draw is not None and draw.limits is not None
    assert draw.seeds.tolist()[1:] == [13, 12, 11]
    assert draw.positions.tolist() == [4, 1, 1, 5], "tokens beyond the prompt"
    assert draw.temperature.tolist() == pytest.approx([0.0, 0.7, 1.0, 1.0])
    assert draw.limits.top_k.tolist() == [0, 0, 5, 0] and draw.limits.max_k == 5
    assert draw.limits.top_p.tolist() == pytest.approx([1.0, 0.9, 0.5, 1.0])
    assert draw.limits.min_p.tolist() == [0.0] * 4
    assert penalties is not None
    assert penalties.index.tolist() == [0] and penalties.slots.tolist() == [4] and penalties.presence.tolist() == [1.0]


def test_limits_only_where_a_row_that_draws_has_one() -> None:
    sampling: Any = sampling_of([Sampling(8, min_p=0.2)], [4], [(0, 3, 1, 1)])
    assert sampling.draw.limits.min_p.tolist() == pytest.approx([0.2])
    sampling = sampling_of([Sampling(8), Sampling(8, temperature=0.0, top_p=0.5)], [4, 4], [(0, 3, 1, 1), (1, 3, 1, 1)])
    assert sampling.draw.limits is None


def test_ends_are_barred_until_min_tokens() -> None:
    early = Sampling(8, temperature=0.0, min_tokens=3, stop_token_ids=(9,))
    biased = Sampling(8, temperature=0.0, logit_bias=((7, -1.0),))
    work = [(0, 3, 1, 1), (1, 3, 1, 1), (2, 4, 1, 1)]
    edits: Any = sampling_of([early, biased, early], [4, 4, 5], work)
    assert edits.edits.index.tolist() == [9, 2, 57], "row 0 has two output tokens, row 2 has three"
    assert edits.edits.values.tolist() == [-torch.inf, -torch.inf, -1.0]
    assert sampling_of([early], [5], [(0, 4, 1, 1)]) is None

"""Blocks of the grid, and parts of the context."""

import pytest
import torch

from services.worker.kernels.impl.triton import _prefill_parts
from services.worker.kernels.impl.triton._prefill_parts import choose_splits, count_blocks


def test_blocks_suffice_for_every_row() -> None:
    """Each row's blocks begin behind those of the row before, and the last of the last row is in the grid."""
    for counts in ([1], [64], [65], [1, 64, 1], [63, 2, 128, 1], [1] * 5):
        starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        ends = [starts[row] // 64 + row + -(-count // 64) for row, count in enumerate(counts)]
        assert all(end <= starts[row + 1] // 64 + row + 1 for row, end in enumerate(ends[:-1]))
        assert ends[-1] <= count_blocks(sum(counts), len(counts), 64)


def test_long_contexts_of_few_programs_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prefill_parts, "processors", lambda device: 132)
    cpu = torch.device("cpu")
    assert choose_splits(72, 512, 2**20, cpu) == 1
    assert choose_splits(1024, 100_000, 2**20, cpu) == 1
    assert choose_splits(64, 100_000, 2**20, cpu) in range(2, 17)
    assert choose_splits(8, 100_000, 2**20, cpu) == 16
    assert choose_splits(8, 4096, 2**20, cpu) == 4
    # sums that are large are better not joined too often
    assert choose_splits(8, 50_000, 2**23, cpu) < choose_splits(8, 50_000, 2**20, cpu) == 16
    # one program more than fit at once would need twice the time
    assert choose_splits(133, 50_000, 2**20, cpu) > 1

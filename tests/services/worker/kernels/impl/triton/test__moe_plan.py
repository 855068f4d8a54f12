"""Which path and tiles the experts' kernels take."""

import pytest
import torch

from services.worker.kernels.impl.triton import _moe_plan
from services.worker.kernels.impl.triton._moe_plan import (
    DESCRIBED,
    Experts,
    Few,
    Grouped,
    Tile,
    amd_grouped,
    choose,
    default_few,
    nvidia_grouped,
    wide_grouped,
)

A3B = Experts(128, 8, 2048, 768)
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def test_few_tokens_are_not_sorted() -> None:
    assert isinstance(choose(A3B, 1, CPU, BF16), Few) and isinstance(choose(A3B, 4, CPU, BF16), Few)
    assert isinstance(choose(A3B, 5, CPU, BF16), Grouped)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    sizes = [choose(A3B, tokens, CPU, BF16).block_m for tokens in (5, 64, 256, 512, 1024, 4096, 100_000)]  # type: ignore[union-attr]
    assert sizes == [16, 16, 16, 32, 64, 128, 128]


def test_many_tokens_take_descriptors_where_a_gpu_has_them_and_rows_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(A3B, 4096, CPU, BF16) == amd_grouped(128)
    monkeypatch.setattr(_moe_plan, "has_dependent_launch", lambda device: True)
    assert choose(A3B, 4096, CPU, BF16) == DESCRIBED
    assert choose(A3B._replace(inner=770), 4096, CPU, BF16) == amd_grouped(128)
    assert choose(A3B, 1024, CPU, BF16).block_m == 64  # type: ignore[union-attr]


def test_tiles_fit_what_a_block_has() -> None:
    for block_m in (16, 32, 64, 128):
        for plan, limit, itemsize in (
            (amd_grouped(block_m), 64 << 10, 2),
            (nvidia_grouped(block_m), 227 << 10, 2),
            (wide_grouped(block_m), 64 << 10, 4),
        ):
            for tile, matrices in ((plan.up, 2), (plan.down, 1)):
                buffers = tile.stages if limit > 64 << 10 else tile.stages - 1
                assert (matrices * tile.rows + plan.block_m) * tile.block_k * itemsize * buffers <= limit
    for shape in (A3B, Experts(8, 2, 4096, 14336), Experts(5, 3, 48, 80), Experts(512, 22, 2048, 512)):
        few = default_few(shape)
        assert few.up_chunk & (few.up_chunk - 1) == 0 and few.down_chunk & (few.down_chunk - 1) == 0
        assert few.down_rows >= 1


def test_a_tuned_table_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Experts(3, 2, 64, 32)
    sizes = shape._asdict()
    rows = [
        sizes | {"tokens": 64, "block_m": 32, "up": [64, 64, 1, 4, 4], "down": [128, 64, 1, 8, 3]},
        sizes | {"tokens": 2, "few": [4, 64, 4, 2, 32, 4]},
        A3B._asdict() | {"tokens": 1, "few": [8, 64, 4, 2, 32, 4]},
    ]
    monkeypatch.setattr(_moe_plan, "table", lambda op, device: rows)
    device = torch.device("meta")  # nobody else's entry in the cache
    few, grouped = Few(4, 64, 4, 2, 32, 4), Grouped(32, Tile(64, 64, 1, 4, 4), Tile(128, 64, 1, 8, 3))
    found = [choose(shape, tokens, device, BF16) for tokens in (1, 2, 3, 64, 65)]
    assert found == [few, few, grouped, grouped, grouped]
    assert choose(shape, 64, device, torch.float32) == wide_grouped(64)

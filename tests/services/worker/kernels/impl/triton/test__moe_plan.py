"""Which path and tiles the experts' kernels take."""

import torch

from services.worker.kernels.impl.triton._moe_plan import Experts, Few, Grouped, amd_grouped, choose, default_few

A3B = Experts(128, 8, 2048, 768)
CPU = torch.device("cpu")


def test_few_tokens_are_not_sorted() -> None:
    assert isinstance(choose(A3B, 1, CPU), Few) and isinstance(choose(A3B, 4, CPU), Few)
    assert isinstance(choose(A3B, 5, CPU), Grouped)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    sizes = [choose(A3B, tokens, CPU).block_m for tokens in (5, 64, 256, 512, 1024, 4096, 100_000)]  # type: ignore[union-attr]
    assert sizes == [16, 16, 16, 32, 64, 128, 128]


def test_tiles_fit_what_a_block_has() -> None:
    for block_m in (16, 32, 64, 128):
        plan = amd_grouped(block_m)
        for tile, matrices in ((plan.up, 2), (plan.down, 1)):
            assert (matrices * tile.rows + block_m) * tile.block_k * 2 * (tile.stages - 1) <= 64 << 10
    for shape in (A3B, Experts(8, 2, 4096, 14336), Experts(5, 3, 48, 80), Experts(512, 22, 2048, 512)):
        few = default_few(shape)
        assert few.up_chunk & (few.up_chunk - 1) == 0 and few.down_chunk & (few.down_chunk - 1) == 0
        assert few.down_rows >= 1

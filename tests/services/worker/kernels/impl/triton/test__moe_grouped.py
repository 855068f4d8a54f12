"""The sort of pairs by expert, and products of many tokens in any tiling."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_grouped import TABLE_START
from services.worker.kernels.impl.triton._moe_plan import Grouped, Tile
from services.worker.kernels.impl.triton.moe_gated import Sorted, run_grouped
from services.worker.kernels.ops.moe_gated import make_moe_case, moe_gated


@pytest.mark.parametrize(("num_tokens", "num_experts", "block_m"), [(1, 5, 16), (100, 5, 16), (700, 3, 32)])
def test_every_pair_lies_in_a_block_of_its_expert(
    num_tokens: int, num_experts: int, block_m: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.rand(num_tokens, num_experts, generator=generator).topk(2).indices.int()
    experts[experts == 1] = 0  # one without tokens
    ordered = Sorted(experts.to(device), num_experts, block_m)
    plan, pairs = ordered.plan.tolist(), 2 * num_tokens
    assert plan[0] <= ordered.max_blocks
    assert len(plan) == ordered.ids_start + ordered.max_blocks * block_m
    flat, seen = experts.flatten().tolist(), []
    for block in range(plan[0]):
        begin = ordered.ids_start + block * block_m
        ids = [pair for pair in plan[begin : begin + block_m] if pair != pairs]
        assert ids and {flat[pair] for pair in ids} == {plan[TABLE_START.value + block]}
        seen += ids
    assert sorted(seen) == list(range(pairs))


@pytest.mark.parametrize("block_m", [16, 32])
def test_any_tiling_gives_the_same(block_m: int, device: torch.device) -> None:
    case = make_moe_case(21, 3, 2, 80, 48)
    wanted = case.make(torch.float32)
    moe_gated.meaning(*wanted)
    for up, down in (
        (Tile(64, 32, 1, 4, 3), Tile(32, 16, 3, 4, 2)),
        (Tile(16, 16, 8, 4, 2), Tile(64, 64, 1, 4, 4)),
    ):
        arguments = [value.to(device) for value in case.make(torch.float32)]
        run_grouped(Grouped(block_m, up, down), *arguments)
        torch.testing.assert_close(arguments[-1].cpu(), wanted[-1], rtol=1e-5, atol=3e-5)

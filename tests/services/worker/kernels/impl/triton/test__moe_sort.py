"""The sort of pairs by expert, in one launch and in two."""

import pytest
import torch

from services.worker.kernels.impl.triton import _moe_sort
from services.worker.kernels.impl.triton._moe_sort import TABLE_START, Sorted


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "block_m"), [(1, 5, 16), (100, 5, 16), (700, 3, 32), (800, 70, 128), (900, 30, 48)]
)
def test_every_pair_lies_in_a_block_of_its_expert(
    num_tokens: int,
    num_experts: int,
    block_m: int,
    launches: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_moe_sort, "FEW_PAIRS", 2048 if launches == 1 else 0)
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
        places = plan[begin : begin + block_m]
        ids = [pair for pair in places if pair != pairs]
        assert ids and places[: len(ids)] == ids, "from the block's start on"
        assert {flat[pair] for pair in ids} == {plan[TABLE_START.value + block]}
        seen += ids
    assert sorted(seen) == list(range(pairs))
    assert seen == sorted(seen, key=lambda pair: flat[pair]), "stable"

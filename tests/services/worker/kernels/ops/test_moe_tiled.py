from types import SimpleNamespace

import torch

from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.ops.moe_tiled import model_cases, moe_tiled
from services.worker.kernels.packing.weight_tiles import untile_weight


def test_is_moe_gated_of_the_matrices() -> None:
    for dtype in moe_tiled.tolerances:
        for case in moe_tiled.cases:
            x, weights, experts, gate_up, down, residual = case.make(dtype)
            wanted = residual.clone()
            moe_gated.meaning(x, weights, experts, untile_weight(gate_up), untile_weight(down), wanted)
            moe_tiled.meaning(x, weights, experts, gate_up, down, residual)
            assert torch.equal(residual, wanted)
            assert gate_up.dim() == down.dim() == 5


def test_cases_of_a_model_are_those_that_its_experts_have_tiles_for() -> None:
    shapes, sizes = {"hidden_size": 64, "expert_size": 32, "num_experts": 4, "top_k": 2}, SimpleNamespace(all=(1, 16))
    cases = list(model_cases(shapes, sizes))
    assert [case.make(torch.bfloat16)[0].shape for case in cases] == [(1, 64), (16, 64)]
    assert cases[0].make(torch.bfloat16)[3].shape == (4, 4, 8, 16, 8)
    assert not list(model_cases(shapes | {"expert_size": 24}, sizes))
    assert not list(model_cases({"hidden_size": 64}, sizes))

import torch

from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.ops.moe_tiled import moe_tiled
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

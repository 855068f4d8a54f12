import torch
from torch import Tensor

from services.worker.kernels.ops.moe_block_scaled import moe_block_scaled
from services.worker.kernels.packing.weight_tiles import untile_weight
from services.worker.kernels.registry import Case

OP, ROUNDING = moe_block_scaled, 0.05


def dequantized(weight: Tensor, scales: Tensor, expert: int) -> Tensor:
    rows = untile_weight(weight[expert]).double()
    for i in range(len(rows) // 128):
        for j in range(rows.shape[1] // 128):
            rows[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scales[expert, i, j].item()
    return rows


def run(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the op makes of the residual stream, and the dense experts of the dequantized weights in float64."""
    x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual = case.make(dtype)
    wanted = residual.double()
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            up = dequantized(gate_up, gate_up_scales, expert)
            gate, value = (up @ x[token].double()).chunk(2)
            gated = gate / (1 + (-gate).exp()) * value
            wanted[token] += weight * (dequantized(down, down_scales, expert) @ gated)
    OP.meaning(x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual)
    return residual, wanted


def test_is_near_the_dense_experts() -> None:
    """Activations are rounded too, so the sums differ by a few hundredths of their size."""
    for dtype in OP.tolerances:
        for case in OP.cases:
            got, wanted = run(case, dtype)
            assert got.dtype == dtype
            if len(wanted):
                before = case.make(dtype)[-1].double()
                size = (wanted - before).square().mean().sqrt()
                assert (got.double() - wanted).square().mean().sqrt() < ROUNDING * size + 0.01

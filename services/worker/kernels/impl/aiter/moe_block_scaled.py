"""Experts in fp8 with a scale per block by AITER's fused kernels."""

from torch import Tensor

from services.worker.kernels.impl.aiter._moe import add_fused, refuses_experts, shuffled
from services.worker.kernels.ops.moe_block_scaled import moe_block_scaled
from services.worker.kernels.registry import Impl

FAULTY = (304, 336)  # tokens, with which gfx942 faults where AITER has not tuned the shape (ROCm/aiter#4783)


def fused(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    tiles, scales = (shuffled(gate_up), shuffled(down)), (gate_up_scales, down_scales)
    at_once = len(x) // 2 if len(x) in FAULTY else max(len(x), 1)
    for start in range(0, len(x), at_once):
        part = slice(start, start + at_once)
        add_fused(residual[part], x[part], (weights[part], experts[part]), tiles, scales, "per_128x128")


IMPL = Impl(moe_block_scaled, "aiter", fused, refuses_experts)

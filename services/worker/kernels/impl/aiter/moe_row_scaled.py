"""Experts in 8 bits with a scale per row by AITER's fused kernels."""

from torch import Tensor

from services.worker.kernels.impl.aiter._moe import add_fused, refuses_experts, shuffled
from services.worker.kernels.ops.moe_row_scaled import moe_row_scaled
from services.worker.kernels.registry import Impl


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
    add_fused(residual, x, (weights, experts), tiles, scales, "per_Token")


IMPL = Impl(moe_row_scaled, "aiter", fused, refuses_experts)

"""Experts in MXFP4 by AITER's fused kernels."""

from torch import Tensor

from services.worker.kernels.impl.aiter._moe import FUSED, add_fused, refuses_experts, shuffled
from services.worker.kernels.impl.aiter._mxfp4 import FP4X2, as_scales, refuses_mxfp4
from services.worker.kernels.ops.moe_mxfp4 import moe_mxfp4
from services.worker.kernels.registry import Facts, Impl

WIDTH = 256  # of hidden and inner: scales come in tiles of 256 rows


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
    tiles = shuffled(gate_up, FP4X2), shuffled(down, FP4X2)
    scales = as_scales(gate_up_scales), as_scales(down_scales)
    add_fused(residual, x, (weights, experts), tiles, scales, "per_1x32")


def refuses(facts: Facts) -> str | None:
    widths = facts.shapes.get("expert_size", WIDTH), facts.shapes.get("hidden_size", WIDTH)
    if any(width % WIDTH for width in widths):
        return f"experts of multiples of {WIDTH} both ways, not {widths[0]} by {widths[1]}"
    return refuses_mxfp4(facts, FUSED) or refuses_experts(facts)


IMPL = Impl(moe_mxfp4, "aiter", fused, refuses)

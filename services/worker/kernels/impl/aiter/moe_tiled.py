"""Experts in 16 bits by AITER's fused kernels."""

from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF
from services.worker.kernels.impl.aiter._moe import add_fused, refuses_experts, shuffled
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.registry import Facts, Impl


def fused(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> None:
    add_fused(residual, x, (weights, experts), (shuffled(gate_up), shuffled(down)), (None, None), "No")


def refuses(facts: Facts) -> str | None:
    return refuses_experts(facts, HALF)


IMPL = Impl(moe_tiled, "aiter", fused, refuses)

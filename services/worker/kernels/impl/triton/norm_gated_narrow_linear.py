"""Norm, gate and up with a weight of 8 or 4 bits, by `_narrow_fused`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_fused, _narrow_planes
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.norm_gated_narrow_linear import norm_gated_narrow_linear
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    narrow = _narrow_fused.narrow_of(weight, scales, zeros)
    if not _narrow_fused.suits(narrow, x):
        return norm_gated_narrow_linear.meaning(x, norm, eps, weight, scales, zeros, bias, activation)
    return _narrow_fused.after_norm(x, (norm, eps), narrow, bias, activation)


IMPL = Impl(norm_gated_narrow_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("int4", ((14336, 4096),), (1, 16), group=128, zeros=True, activation="silu", norm=True)
AOT += (_narrow_planes.aot_case(4096, 128, True),)

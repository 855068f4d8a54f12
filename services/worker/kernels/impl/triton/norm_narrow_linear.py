"""Norm and product with a weight of 8 or 4 bits, by `_narrow_fused`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_fused
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.norm_narrow_linear import norm_narrow_linear
from services.worker.kernels.registry import Impl


def run(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    narrow = _narrow_fused.narrow_of(weight, scales, zeros)
    if not _narrow_fused.suits(narrow, x):
        return norm_narrow_linear.meaning(x, norm, eps, weight, scales, zeros, bias)
    return _narrow_fused.after_norm(x, (norm, eps), narrow, bias)


IMPL = Impl(norm_narrow_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("int4", ((6144, 4096),), (1,), group=128, zeros=True, norm=True)
AOT += _narrow_ahead.aot_cases("rows", ((6144, 4096),), (1, 16), norm=True)

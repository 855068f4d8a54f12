"""Products of fp8 numbers with one scale each by AITER's tuned GEMM."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.tensor_scaled_linear import tensor_scaled_linear
from services.worker.kernels.registry import Facts, Impl

MM = Function(
    "aiter.tuned_gemm:tgemm.mm",
    needs=("inp", "weights", "bias", "otype", "scale_a", "scale_b"),
    twin=_triton.SCALED_MM,
)


def scaled(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if not len(x):
        return tensor_scaled_linear.meaning(x, scale, weight, weight_scale, bias, dtype)
    product: Tensor = MM(inp=x, weights=weight, bias=bias, otype=dtype, scale_a=scale, scale_b=weight_scale)
    return product


def refuses(facts: Facts) -> str | None:
    return refusal(facts, MM)


IMPL = Impl(tensor_scaled_linear, "aiter", scaled, refuses)

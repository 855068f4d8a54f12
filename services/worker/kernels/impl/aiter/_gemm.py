"""AITER's tuned GEMM: which kernel computes a shape is AITER's choice, from its tuned tables."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function

MM = Function("aiter.tuned_gemm:tgemm.mm", needs=("inp", "weights", "bias"), twin=_triton.MM)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias. x: [T, in]; weight: [out, in]; returns a new [T, out]."""
    if not len(x):
        return torch.empty((0, len(weight)), dtype=x.dtype, device=x.device)
    result: Tensor = MM(inp=x, weights=weight, bias=bias)
    return result

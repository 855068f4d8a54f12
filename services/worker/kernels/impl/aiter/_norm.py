"""AITER's RMS normalization: what the norm itself and the projections behind one share."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.registry import Facts

RMS_NORM = Function("aiter:rmsnorm2d_fwd", needs=("input", "weight", "epsilon"), twin=_triton.RMS_NORM)
ADD_RMS_NORM = Function(
    "aiter:rmsnorm2d_fwd_with_add",
    needs=("out", "input", "residual_in", "residual_out", "weight", "epsilon"),
    twin=_triton.ADD_RMS_NORM,
)
WIDEST = 8192  # what AITER's kernels for 16-bit rows are built for
VECTOR = 8  # numbers of 16 bytes


def refuses_norm(facts: Facts, *functions: Function) -> str | None:
    """As `refusal`, and what the width of the residual stream must be."""
    width = facts.shapes.get("hidden_size", VECTOR)
    if width > WIDEST or width % VECTOR:
        return f"norms rows of multiples of {VECTOR} up to {WIDEST}, not of {width}"
    return refusal(facts, *functions)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., N], N contiguous; returns a new tensor like x."""
    if not x.numel():
        return torch.empty_like(x)
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = RMS_NORM(input=rows, weight=weight, epsilon=eps)
    return result.view(x.shape)

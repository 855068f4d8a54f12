"""Residual add, RMS normalization and 8-bit numbers with a scale per token in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._norm import refuses_norm
from services.worker.kernels.ops.add_norm_quantize_rows import add_norm_quantize_rows
from services.worker.kernels.registry import Facts, Impl

NORM = Function(
    "aiter:rmsnorm2d_fwd_with_add_dynamicquant",
    needs=("out", "input", "residual_in", "residual_out", "yscale", "weight", "epsilon"),
    twin=_triton.ADD_NORM_QUANTIZE,
)


def added_normed_and_quantized(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    numbers, total = (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        NORM(
            out=numbers,
            input=x.contiguous(),
            residual_in=residual.contiguous(),
            residual_out=total,
            yscale=scales,
            weight=norm,
            epsilon=eps,
        )
    return numbers, scales, total


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, NORM)


IMPL = Impl(add_norm_quantize_rows, "aiter", added_normed_and_quantized, refuses)

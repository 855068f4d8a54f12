"""Residual add, RMS normalization and fp8 numbers with a scale per token and group in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._norm import refuses_norm
from services.worker.kernels.impl.aiter.norm_quantize_groups import numbers_and_scales
from services.worker.kernels.ops.add_norm_quantize_groups import add_norm_quantize_groups
from services.worker.kernels.registry import Facts, Impl

NORM = Function(
    "aiter:rmsnorm2d_fwd_with_add_dynamicquant",
    needs=(
        *("out", "input", "residual_in", "residual_out", "yscale", "weight", "epsilon"),
        *("group_size", "shuffle_scale"),
    ),
)


def added_normed_and_quantized(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, group: int, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    numbers, scales = numbers_and_scales(x, dtype, group)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        NORM(
            out=numbers,
            input=x.contiguous(),
            residual_in=residual.contiguous(),
            residual_out=total,
            yscale=scales,
            weight=norm,
            epsilon=eps,
            group_size=group,
            shuffle_scale=by_column,
        )
    return numbers, scales.view(scales.shape[::-1]) if by_column else scales, total


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, NORM)


IMPL = Impl(add_norm_quantize_groups, "aiter", added_normed_and_quantized, refuses)

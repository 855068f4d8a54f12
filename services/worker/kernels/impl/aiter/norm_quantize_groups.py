"""RMS normalization and fp8 numbers with a scale per token and group in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._norm import refuses_norm
from services.worker.kernels.ops.norm_quantize_groups import norm_quantize_groups
from services.worker.kernels.registry import Facts, Impl

NORM = Function(
    "aiter:rmsnorm2d_fwd_with_dynamicquant",
    needs=("out", "input", "yscale", "weight", "epsilon", "group_size", "shuffle_scale"),
)


def numbers_and_scales(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Memory for both: [T, N] and fp32 [T, N / group]."""
    num_tokens, width = x.shape
    scales = torch.empty((num_tokens, width // group), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=dtype, device=x.device), scales


def normed_and_quantized(
    x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, group: int, by_column: bool
) -> tuple[Tensor, Tensor]:
    numbers, scales = numbers_and_scales(x, dtype, group)
    if len(x):
        NORM(
            out=numbers,
            input=x.contiguous(),
            yscale=scales,
            weight=norm,
            epsilon=eps,
            group_size=group,
            shuffle_scale=by_column,
        )
    return numbers, scales.view(scales.shape[::-1]) if by_column else scales


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, NORM)


IMPL = Impl(norm_quantize_groups, "aiter", normed_and_quantized, refuses)

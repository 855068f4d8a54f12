"""Activations to fp8 while serving: one scale per token and 128 columns, as block-scaled weights want."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES, make_quantize_case, quantized
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.mx import grouped
from services.worker.kernels.registry import Case, op


def make_groups_case(num_tokens: int, width: int, group: int, by_column: bool) -> Case:
    def make(activation: torch.dtype) -> tuple[Tensor, torch.dtype, int, bool]:
        x, _ = make_quantize_case(num_tokens, width).make(activation)
        return x, native_fp8(), group, by_column

    return Case(f"{num_tokens}x{width}g{group}{'c' if by_column else ''}", make)


def by_group(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    numbers, scales = quantized(grouped(x, group), dtype)
    scales = scales.squeeze(-1)
    return numbers.flatten(-2), scales.T.contiguous() if by_column else scales


@op(
    cases=[
        make_groups_case(1, 4096, 128, True),
        make_groups_case(5, 512, 128, False),
        make_groups_case(7, 256, 32, False),
        make_groups_case(33, 2048, 128, True),
        make_groups_case(0, 256, 128, True),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def quantize_groups(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    """x [T, N] as fp8 [T, N] and fp32 scales [T, N / group], or [N / group, T] `by_column` (for tiled weights).

    N is a multiple of `group`. Scales as in quantize_rows, over a group each.
    """
    return by_group(x, dtype, group, by_column)

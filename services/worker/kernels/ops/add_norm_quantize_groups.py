"""Residual add, RMS normalization and the fp8 form of its result, a scale per token and group, in one pass."""

import torch
from torch import Tensor

from services.worker.kernels.ops.add_norm_quantize_rows import make_add_norm_quantize_case
from services.worker.kernels.ops.quantize_groups import by_group
from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Case, op


def make_add_norm_groups_case(num_tokens: int, width: int, by_column: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float, torch.dtype, int, bool]:
        return *make_add_norm_quantize_case(num_tokens, width).make(dtype), 128, by_column

    return Case(f"{num_tokens}x{width}{'c' if by_column else ''}", make)


@op(
    cases=[
        make_add_norm_groups_case(1, 4096, True),
        make_add_norm_groups_case(33, 1024, False),
        make_add_norm_groups_case(0, 256, True),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def add_norm_quantize_groups(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, group: int, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """norm_quantize_groups(x + residual, norm, eps, dtype, group, by_column), and x + residual. x, residual: [T, N]."""
    total = x + residual
    return *by_group(normalized(total, norm, eps), dtype, group, by_column), total

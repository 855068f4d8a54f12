"""Residual add, RMS normalization and the 8-bit form of its result, a scale per token, in one pass over memory."""

import torch
from torch import Tensor

from services.worker.kernels.ops.norm_quantize_rows import make_norm_quantize_case
from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES, quantized
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Case, op


def make_add_norm_quantize_case(num_tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float, torch.dtype]:
        x, norm, eps, stored = make_norm_quantize_case(num_tokens, width).make(dtype)
        generator = torch.Generator().manual_seed(width)
        return x, torch.randn(num_tokens, width, generator=generator).to(dtype), norm, eps, stored

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[
        make_add_norm_quantize_case(1, 4096),
        make_add_norm_quantize_case(33, 1024),
        make_add_norm_quantize_case(0, 256),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def add_norm_quantize_rows(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """norm_quantize_rows(x + residual, norm, eps, dtype), and x + residual. x, residual: [T, N], one dtype."""
    total = x + residual
    return *quantized(normalized(total, norm, eps), dtype), total

"""RMS normalization and the 8-bit form of its result, a scale per token: the normed row is never stored."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES, quantized
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, op


def make_norm_quantize_case(num_tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float, torch.dtype]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        x = torch.randn(num_tokens, width, generator=generator)
        norm = (torch.rand(width, generator=generator) + 0.5) * 128  # scales near 1, see quantize_rows
        return x.to(dtype), norm.to(dtype), 1e-5, native_fp8()

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[make_norm_quantize_case(1, 4096), make_norm_quantize_case(33, 1024), make_norm_quantize_case(0, 256)],
    tolerances=QUANTIZE_TOLERANCES,
)
def norm_quantize_rows(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """quantize_rows(rms_norm(x, norm, eps), dtype). x: [T, N]; norm: [N]; returns [T, N] of `dtype` and fp32 [T, 1]."""
    return quantized(normalized(x, norm, eps), dtype)

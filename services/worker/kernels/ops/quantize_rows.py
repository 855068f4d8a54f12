"""Activations to 8 bits while serving: one scale per token, from the token's own largest number."""

import torch
from torch import Tensor

from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, Tolerance, op

SMALLEST = 1e-10  # largest number of a group of zeros, so that no scale is 0
# Numbers are compared as stored, so a step of fp8 is what one rounding may move them by.
QUANTIZE_TOLERANCES = {
    dtype: Tolerance(0.13, 0.01, "a number between two of fp8 may go to either")
    for dtype in (torch.float32, *(torch.bfloat16, torch.float16))
}


def limit_of(dtype: torch.dtype) -> float:
    """The largest number of float8_e4m3fn (448), float8_e4m3fnuz (240) or int8 (127)."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def stored(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 numbers rounded to the nearest of `dtype`; beyond its largest, its largest."""
    limit = limit_of(dtype)
    clamped = scaled.clamp(-limit, limit)
    return clamped.round().to(dtype) if dtype == torch.int8 else clamped.to(dtype)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Over the last dimension of x: the numbers in `dtype`, and fp32 scales [..., 1]; numbers * scales is about x."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST) / limit_of(dtype)
    return stored(wide / scales, dtype), scales


def make_quantize_case(num_tokens: int, width: int, dtype: torch.dtype | None = None) -> Case:
    """`dtype`: of the result, the device's own fp8 if None. int8: numbers that need no rounding."""

    def make(activation: torch.dtype) -> tuple[Tensor, torch.dtype]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        # so large that the scales are near 1: one tolerance serves numbers and scales
        x = torch.randn(num_tokens, width, generator=generator) * 128
        if dtype == torch.int8:
            x = x.round().clamp(-127, 127) / 2
            x[:, 0] = 63.5
        return x.to(activation), dtype or native_fp8()

    return Case(f"{num_tokens}x{width}{'i8' if dtype == torch.int8 else ''}", make)


@op(
    cases=[
        make_quantize_case(1, 4096),
        make_quantize_case(5, 576),
        make_quantize_case(33, 2048, torch.int8),
        make_quantize_case(0, 256),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, N] as numbers of `dtype` (float8_e4m3fn, float8_e4m3fnuz or int8) [T, N] and fp32 scales [T, 1].

    scale = the row's largest magnitude / the dtype's largest number; number = x / scale, to nearest.
    """
    return quantized(x, dtype)

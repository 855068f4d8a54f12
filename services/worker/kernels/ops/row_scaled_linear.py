"""Matrix product of 8-bit numbers with a scale per token and one per row of the weight (W8A8, PTPC)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.weight_tiles import plain, tile_weight
from services.worker.kernels.registry import Case, Tolerance, op

# What enters is already rounded, so what differs is the order of fp32 sums and the result's rounding.
SCALED_TOLERANCES = {
    torch.float32: Tolerance(1e-3, 5e-3, "units for 8-bit floats may keep 14 bits of a sum, as an H200's do"),
    torch.bfloat16: Tolerance(1.6e-2, 2e-2, "fp32 sums, one rounding to 8 bits, twice with a bias"),
    torch.float16: Tolerance(2e-3, 4e-3, "fp32 sums, one rounding to 11 bits, twice with a bias"),
}


def make_operands(num_tokens: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias in fp32, of a layer whose outputs are about 1."""
    generator = torch.Generator().manual_seed(num_tokens + out_features)
    x = torch.randn(num_tokens, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    return x, weight, torch.randn(out_features, generator=generator)


def make_rows_case(
    num_tokens: int,
    in_features: int,
    out_features: int,
    tiled: bool = False,
    biased: bool = False,
    stored: torch.dtype | None = None,
) -> Case:
    """`stored`: of both operands, the device's own fp8 if None."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        numbers, scales = quantized(x, stored or native_fp8())
        rows, row_scales = quantized(weight, stored or native_fp8())
        rows = tile_weight(rows) if tiled else rows
        return numbers, scales, rows, row_scales, bias.to(dtype) if biased else None, dtype

    marks = f"{'t' if tiled else ''}{'b' if biased else ''}{'i8' if stored == torch.int8 else ''}"
    return Case(f"{num_tokens}x{in_features}x{out_features}{marks}", make)


@op(
    cases=[
        make_rows_case(1, 576, 960),
        make_rows_case(4, 512, 384, tiled=True),
        make_rows_case(33, 256, 48, tiled=True, biased=True),
        make_rows_case(7, 128, 64, biased=True),
        make_rows_case(5, 256, 96, biased=True, stored=torch.int8),
        make_rows_case(0, 64, 32, tiled=True),
    ],
    tolerances=SCALED_TOLERANCES,
)
def row_scaled_linear(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x * scales) @ (weight * weight_scales).T + bias, summed in fp32; returns a new [T, out] of `dtype`.

    x: fp8 or int8 [T, in]; scales: fp32 [T, 1]; weight: x's dtype, [out, in] or its tiles (fp8 only, see
    packing.weight_tiles); weight_scales: fp32 [out, 1]; bias: [out] of `dtype`.
    """
    product = (x.float() @ plain(weight).float().T) * scales * weight_scales.T
    return (product if bias is None else product + bias.float()).to(dtype)

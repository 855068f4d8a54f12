"""RMS normalization and the product that reads it, with a weight of 8 or 4 bits in any of the forms that ops know."""

import torch
from torch import Tensor

from services.worker.kernels.ops.block_scaled_linear import block_dequantized, block_quantized
from services.worker.kernels.ops.int4_linear import encode_int4
from services.worker.kernels.ops.int8_linear import decode_int8
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.int4 import decode_int4
from services.worker.kernels.packing.mx import decode_mxfp4, encode_mxfp4
from services.worker.kernels.registry import Case, Tolerance, op

# Rows and blocks of 8 bits are made for activations of 8 bits, which few rows may be spared.
NARROW_TOLERANCES = {
    torch.float32: Tolerance(1e-3, 0.15, "x may be rounded to 8 bits"),
    torch.bfloat16: Tolerance(2e-2, 0.2, "x may be rounded to 8 bits; the normed row and the weight are, or not"),
    torch.float16: Tolerance(3e-3, 0.15, "x may be rounded to 8 bits; the normed row and the weight to 11, or not"),
}
Stored = tuple[Tensor, Tensor, Tensor | None]


def form_of(weight: Tensor, scales: Tensor) -> str:
    """What a weight is, by its dtypes and shapes.

    "mxfp4", "int4": uint8 [out, in / 2], with scales uint8 [out, in / 32] or float [out, in / group]. "rows": fp8 or
    int8 [out, in], scales fp32 [out, 1]. "blocks": fp8, scales fp32 [out / 128, in / 128]. "int8": scales
    [out, in / group].
    """
    if weight.dtype == torch.uint8:
        return "mxfp4" if scales.dtype == torch.uint8 else "int4"
    if scales.shape == (len(weight), 1):
        return "rows"
    return "int8" if weight.dtype == torch.int8 else "blocks"


def widened(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The fp32 matrix [out, in] that it stands for. zeros: of int4, as there."""
    form = form_of(weight, scales)
    if form == "int4":
        return decode_int4(weight, scales, zeros)
    if form == "mxfp4":
        return decode_mxfp4(weight, scales)
    if form == "int8":
        return decode_int8(weight, scales)
    return weight.float() * scales if form == "rows" else block_dequantized(weight, scales)


def narrowed(weight: Tensor, form: str) -> Stored:
    """An fp32 matrix in a form; "rows8": of int8, "int4z": with zeros and groups of 128, "int4": groups of 32."""
    if form.startswith("rows"):
        return *quantized(weight, torch.int8 if form == "rows8" else native_fp8()), None
    if form == "blocks":
        return *block_quantized(weight, native_fp8()), None
    if form == "mxfp4":
        return *encode_mxfp4(weight), None
    if form == "int8":
        numbers, scales = quantized(weight.reshape(len(weight), -1, 32), torch.int8)
        return numbers.flatten(-2), scales.squeeze(-1).half(), None
    numbers, scales, zeros = encode_int4(weight, 128 if form == "int4z" else 32, symmetric=form == "int4")
    return numbers, scales.half(), zeros


def make_norm_narrow_case(
    num_tokens: int, in_features: int, out_features: int, form: str, biased: bool = False
) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | float | None, ...]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        norm = torch.rand(in_features, generator=torch.Generator().manual_seed(out_features)) + 0.5
        stored = narrowed(weight, form)
        return (x * 3).to(dtype), norm.to(dtype), 1e-5, *stored, bias.to(dtype) if biased else None

    return Case(f"{num_tokens}x{in_features}x{out_features}{form}{'b' if biased else ''}", make)


@op(
    cases=[
        make_norm_narrow_case(1, 512, 96, "int4z", True),
        make_norm_narrow_case(3, 160, 70, "int4"),
        make_norm_narrow_case(1, 576, 60, "rows"),
        make_norm_narrow_case(5, 128, 48, "rows8", True),
        make_norm_narrow_case(2, 256, 128, "blocks"),
        make_norm_narrow_case(1, 96, 72, "int8"),
        make_norm_narrow_case(1, 384, 40, "mxfp4"),
        make_norm_narrow_case(0, 64, 32, "rows"),
    ],
    tolerances=NARROW_TOLERANCES,
)
def norm_narrow_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """rms_norm(x, norm, eps) @ widened.T + bias, summed in fp32; returns a new [T, out] of x's dtype.

    x: [T, in]; norm: [in]; weight, scales, zeros: see form_of; bias: [out]; norm and bias of x's dtype.
    """
    wide = widened(weight, scales, zeros)
    return norm_linear.meaning(x.float(), norm.float(), eps, wide, None if bias is None else bias.float()).to(x.dtype)

"""Matrix product of MXFP8 activations with an MXFP8 weight (OCP MX 1.0): a power of two per 32 columns of both."""

import torch
from torch import Tensor

from services.worker.kernels.ops.row_scaled_linear import SCALED_TOLERANCES, make_operands
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.packing.mx import decode_mxfp8, encode_mxfp8
from services.worker.kernels.registry import Case, op


def make_mxfp8_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        numbers, scales = encode_mxfp8(x, native_fp8())
        rows, row_scales = encode_mxfp8(weight, native_fp8())
        return numbers, scales, rows, row_scales, bias.to(dtype) if biased else None, dtype

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[
        make_mxfp8_case(1, 512, 960),
        make_mxfp8_case(5, 96, 72),
        make_mxfp8_case(33, 256, 48, biased=True),
        make_mxfp8_case(0, 128, 32),
    ],
    tolerances=SCALED_TOLERANCES,
)
def mxfp8_linear(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of the decoded x and weight plus bias, summed in fp32; returns a new [T, out] of `dtype`.

    x: fp8 [T, in]; weight: x's dtype [out, in]; scales, weight_scales: uint8 [T, in / 32] and [out, in / 32], in no
    tiles; bias: [out] of `dtype`.
    """
    product = decode_mxfp8(x, scales) @ decode_mxfp8(weight, weight_scales).T
    return (product if bias is None else product + bias.float()).to(dtype)

"""Matrix product with an MXFP4 weight (OCP MX 1.0) where x stays as it is (W4A16): for chips without FP4 units."""

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import WEIGHT_ONLY_TOLERANCES
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.packing.mx import decode_mxfp4, encode_mxfp4
from services.worker.kernels.registry import Case, op


def make_mxfp4_weight_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        return x.to(dtype), *encode_mxfp4(weight), bias.to(dtype) if biased else None

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[
        make_mxfp4_weight_case(1, 512, 960),
        make_mxfp4_weight_case(5, 96, 72),
        make_mxfp4_weight_case(33, 256, 48, biased=True),
        make_mxfp4_weight_case(0, 128, 32),
    ],
    tolerances=WEIGHT_ONLY_TOLERANCES,
)
def mxfp4_weight_linear(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """x @ decoded.T + bias, summed in fp32; returns a new [T, out] of x's dtype.

    x: [T, in], in a multiple of 32; weight: uint8 [out, in / 2]; weight_scales: uint8 [out, in / 32]: as
    packing.mx.encode_mxfp4 gives them, in no tiles; bias: [out] of x's dtype.
    """
    product = x.float() @ decode_mxfp4(weight, weight_scales).T
    return (product if bias is None else product + bias.float()).to(x.dtype)

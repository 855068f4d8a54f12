"""Matrix product with an fp8 weight that has a scale for each row; x stays as it is (W8A16)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import WEIGHT_ONLY_TOLERANCES
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, op


def make_fp8_weight_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        return x.to(dtype), *quantized(weight, native_fp8()), bias.to(dtype) if biased else None

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[
        make_fp8_weight_case(1, 576, 960),
        make_fp8_weight_case(5, 128, 72, biased=True),
        make_fp8_weight_case(33, 256, 48),
        make_fp8_weight_case(70, 192, 64, biased=True),
        make_fp8_weight_case(0, 128, 32),
    ],
    tolerances=WEIGHT_ONLY_TOLERANCES,
)
def fp8_weight_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x @ (weight * scales).T + bias, summed in fp32; returns a new [T, out] of x's dtype.

    x: [T, in]; weight: fp8 [out, in]; scales: fp32 [out, 1]; bias: [out] of x's dtype.
    """
    product = x.float() @ (weight.float() * scales).T
    return (product if bias is None else product + bias.float()).to(x.dtype)

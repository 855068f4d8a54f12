"""Matrix product with weights of eight bits in groups of columns (GGUF's Q8_0 and Q6_K); x stays as it is (W8A16)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import WEIGHT_ONLY_TOLERANCES
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import make_operands
from services.worker.kernels.packing.mx import grouped
from services.worker.kernels.registry import Case, op


def decode_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """number * scale, float32 [..., N, K]. weight: int8 [..., N, K]; scales: float [..., N, K / group]."""
    return (weight.float().view(*scales.shape, -1) * scales.float()[..., None]).flatten(-2)


def make_int8_case(num_tokens: int, in_features: int, out_features: int, group: int = 32, biased: bool = False) -> Case:
    """Scales in fp16, as GGUF keeps them."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        numbers, scales = quantized(grouped(weight, group), torch.int8)
        halves = scales.squeeze(-1).to(torch.float16)
        return x.to(dtype), numbers.flatten(-2), halves, bias.to(dtype) if biased else None

    return Case(f"{num_tokens}x{in_features}x{out_features}g{group}{'b' if biased else ''}", make)


@op(
    cases=[
        make_int8_case(1, 512, 960),
        make_int8_case(5, 256, 72, group=16),
        make_int8_case(33, 256, 48, group=128, biased=True),
        make_int8_case(4, 192, 40, group=192),
        make_int8_case(0, 128, 32),
    ],
    tolerances=WEIGHT_ONLY_TOLERANCES,
)
def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x @ (weight * scales).T + bias, summed in fp32; returns a new [T, out] of x's dtype.

    x: [T, in]; weight: int8 [out, in]; scales: fp16, bf16 or fp32 [out, in / group], group 16, 32, 128, ... or in;
    bias: [out] of x's dtype.
    """
    product = x.float() @ decode_int8(weight, scales).T
    return (product if bias is None else product + bias.float()).to(x.dtype)

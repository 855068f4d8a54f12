"""Matrix product with weights of four bits in groups of columns (AWQ, GPTQ, GGUF's Q4); x stays as it is (W4A16)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.row_scaled_linear import SCALED_TOLERANCES, make_operands
from services.worker.kernels.packing.int4 import MIDDLE, decode_int4, pack_int4
from services.worker.kernels.registry import Case, Tolerance, op

LARGEST = 15
# Kernels round the dequantized weight to x's dtype for the matrix cores; the meaning does not.
WEIGHT_ONLY_TOLERANCES = {
    torch.float32: SCALED_TOLERANCES[torch.float32],
    torch.bfloat16: Tolerance(1.6e-2, 3e-2, "weights rounded to 8 bits or not, fp32 sums, the result to 8 bits"),
    torch.float16: Tolerance(2e-3, 5e-3, "weights rounded to 11 bits or not, fp32 sums, the result to 11 bits"),
}


def encode_int4(values: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """[..., N, K] as numbers uint8 [..., N, K / 2], scales float32 [..., N, K / group], zeros uint8 or None.

    Each group's scale is the least that its range fits into; zeros are whole numbers. K is a multiple of `group`.
    """
    groups = values.float().reshape(*values.shape[:-1], -1, group)
    if symmetric:
        scales = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / (MIDDLE - 0.5)
        numbers = (groups / scales).round().add_(MIDDLE).clamp_(0, LARGEST)
        return pack_int4(numbers.flatten(-2)), scales.squeeze(-1), None
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    scales = ((high - low) / LARGEST).clamp_(min=1e-30)
    zeros = (-low / scales).round().clamp_(0, LARGEST)
    numbers = (groups / scales).round().add_(zeros).clamp_(0, LARGEST)
    return pack_int4(numbers.flatten(-2)), scales.squeeze(-1), zeros.squeeze(-1).to(torch.uint8)


def make_int4_case(
    num_tokens: int,
    in_features: int,
    out_features: int,
    group: int = 128,
    asymmetric: bool = True,
    biased: bool = False,
) -> Case:
    """Scales in fp16, as AWQ and GPTQ keep them."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        numbers, scales, zeros = encode_int4(weight, group, symmetric=not asymmetric)
        return x.to(dtype), numbers, scales.to(torch.float16), zeros, bias.to(dtype) if biased else None

    marks = f"g{group}{'z' if asymmetric else ''}{'b' if biased else ''}"
    return Case(f"{num_tokens}x{in_features}x{out_features}{marks}", make)


@op(
    cases=[
        make_int4_case(1, 512, 960),
        make_int4_case(5, 384, 72, asymmetric=False),
        make_int4_case(33, 256, 48, group=32, biased=True),
        make_int4_case(7, 128, 64, group=64),
        make_int4_case(2, 256, 40, group=256, asymmetric=False, biased=True),
        make_int4_case(0, 128, 32),
    ],
    tolerances=WEIGHT_ONLY_TOLERANCES,
)
def int4_linear(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ ((weight - zeros) * scales).T + bias, summed in fp32; returns a new [T, out] of x's dtype.

    x: [T, in]; weight: uint8 [out, in / 2], the lower half byte first (packing.int4); scales: fp16, bf16 or fp32
    [out, in / group], group 32, 64, 128, ... or in; zeros: uint8 or a float dtype, as scales, None: 8 everywhere;
    bias: [out] of x's dtype.
    """
    product = x.float() @ decode_int4(weight, scales, zeros).T
    return (product if bias is None else product + bias.float()).to(x.dtype)

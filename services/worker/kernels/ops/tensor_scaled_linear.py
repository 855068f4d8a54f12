"""Matrix product of fp8 numbers with one scale for all activations and one for the whole weight."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import SCALED_TOLERANCES, make_operands
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, op


def make_tensor_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:
        x, weight, bias = make_operands(num_tokens, in_features, out_features)
        numbers, scale = quantized(x.flatten(), native_fp8())
        whole, weight_scale = quantized(weight.flatten(), native_fp8())
        return numbers.view_as(x), scale, whole.view_as(weight), weight_scale, bias.to(dtype) if biased else None, dtype

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[make_tensor_case(1, 576, 960), make_tensor_case(33, 256, 48, True), make_tensor_case(7, 128, 64)],
    tolerances=SCALED_TOLERANCES,
)
def tensor_scaled_linear(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x * scale) @ (weight * weight_scale).T + bias, summed in fp32; returns a new [T, out] of `dtype`.

    x: fp8 [T, in]; weight: fp8 [out, in]; scale, weight_scale: fp32 [1]; bias: [out] of `dtype`.
    """
    product = (x.float() @ weight.float().T) * scale * weight_scale
    return (product if bias is None else product + bias.float()).to(dtype)

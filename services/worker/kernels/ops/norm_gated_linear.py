"""The first half of a gated MLP in one op: RMS normalization, the fused gate and up projection, the gate."""

import torch
from torch import Tensor

from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Case, Tolerance, op


def make_gated_case(num_tokens: int, in_features: int, width: int, activation: str = "silu") -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float, Tensor, Tensor | None, str]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        x = torch.randn(num_tokens, in_features, generator=generator) * 3
        norm = torch.rand(in_features, generator=generator) + 0.5
        weight = torch.randn(2 * width, in_features, generator=generator) / in_features**0.5
        return x.to(dtype), norm.to(dtype), 1e-5, weight.to(dtype), None, activation

    return Case(f"{num_tokens}x{in_features}x{width}{activation}", make)


@op(
    cases=[
        make_gated_case(1, 576, 960),
        make_gated_case(3, 1024, 70, "gelu_tanh"),
        make_gated_case(16, 128, 256),
        make_gated_case(32, 100, 9),
        make_gated_case(70, 64, 48),
        make_gated_case(0, 64, 32),
    ],
    tolerances={
        torch.float32: Tolerance(2e-5, 4e-5, "order of sums over in_features, twice"),
        torch.bfloat16: Tolerance(2e-2, 6e-2, "gate, up and the normed row rounded to 8 bits before the next, or not"),
        torch.float16: Tolerance(3e-3, 1e-2, "gate, up and the normed row rounded to 11 bits before the next, or not"),
    },
)
def norm_gated_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """activation(gate) * up, where gate and up are the halves of norm_linear(x, ...). Returns a new [T, out / 2].

    x: [T, in]; norm: [in]; weight: [out, in], gate rows first; activation: "silu" or "gelu_tanh".
    """
    fused = norm_linear.meaning(x, norm, eps, weight, bias)
    return {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}[activation].meaning(fused)

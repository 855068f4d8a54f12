"""A dense projection added onto the residual stream in place."""

import torch
from torch import Tensor

from services.worker.kernels.ops.linear import linear
from services.worker.kernels.registry import Case, Tolerance, op


def make_add_linear_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(num_tokens + out_features)
        residual = torch.randn(num_tokens, out_features, generator=generator) * 3
        x = torch.randn(num_tokens, in_features, generator=generator)
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
        return residual.to(dtype), x.to(dtype), weight.to(dtype), bias

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[
        make_add_linear_case(1, 576, 960),
        make_add_linear_case(3, 1024, 70, True),
        make_add_linear_case(16, 128, 256),
        make_add_linear_case(32, 100, 7, True),
        make_add_linear_case(70, 64, 48),
        make_add_linear_case(0, 64, 32),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 2e-5, "order of sums over in_features"),
        torch.bfloat16: Tolerance(1.6e-2, 5e-2, "the product rounded to 8 bits before the sum, or not"),
        torch.float16: Tolerance(2e-3, 8e-3, "the product rounded to 11 bits before the sum, or not"),
    },
    writes=("residual",),
)
def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """residual += x @ weight.T + bias, in place. residual: [T, out], contiguous; x: [T, in]; weight: [out, in]."""
    residual.add_(linear.meaning(x, weight, bias))

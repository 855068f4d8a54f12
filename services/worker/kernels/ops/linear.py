"""Dense matrix product; formats with another storage have their own ops."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Tolerance, op


def make_linear_case(num_tokens: int, in_features: int, out_features: int, biased: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(num_tokens + out_features)
        x = torch.randn(num_tokens, in_features, generator=generator)
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
        return x.to(dtype), weight.to(dtype), bias

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


@op(
    cases=[
        make_linear_case(1, 576, 960, False),
        make_linear_case(33, 100, 7, True),
        make_linear_case(0, 64, 32, False),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "order of sums over in_features"),
        torch.bfloat16: Tolerance(1.6e-2, 2e-2, "fp32 sums, one rounding to 8 bits"),
        torch.float16: Tolerance(2e-3, 4e-3, "fp32 sums, one rounding to 11 bits"),
    },
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias. x: [T, in]; weight: [out, in]; bias: [out] or None; one dtype; returns a new [T, out]."""
    return functional.linear(x, weight, bias)

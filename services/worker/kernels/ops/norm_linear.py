"""RMS normalization and the dense projection that reads it, in one op: few rows never store the normed row."""

import torch
from torch import Tensor

from services.worker.kernels.ops.linear import linear
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Case, Tolerance, op


def make_norm_linear_case(num_tokens: int, in_features: int, out_features: int, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(num_tokens + out_features)
        x = torch.randn(num_tokens, in_features, generator=generator) * 3
        norm = torch.rand(in_features, generator=generator) + 0.5
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
        return x.to(dtype), norm.to(dtype), 1e-5, weight.to(dtype), bias

    return Case(f"{num_tokens}x{in_features}x{out_features}{'b' if biased else ''}", make)


NORM_LINEAR_TOLERANCES = {
    torch.float32: Tolerance(1e-5, 2e-5, "order of sums over in_features, twice"),
    torch.bfloat16: Tolerance(1.6e-2, 4e-2, "the normed row rounded to 8 bits before the product, or not"),
    torch.float16: Tolerance(2e-3, 6e-3, "the normed row rounded to 11 bits before the product, or not"),
}


@op(
    cases=[
        make_norm_linear_case(1, 576, 960),
        make_norm_linear_case(3, 1024, 70, True),
        make_norm_linear_case(16, 128, 256),
        make_norm_linear_case(32, 100, 7, True),
        make_norm_linear_case(70, 64, 48),
        make_norm_linear_case(0, 64, 32),
    ],
    tolerances=NORM_LINEAR_TOLERANCES,
)
def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rms_norm(x, norm, eps) @ weight.T + bias. x: [T, in]; norm: [in]; weight: [out, in]; returns a new [T, out]."""
    return linear.meaning(rms_norm.meaning(x, norm, eps), weight, bias)

"""Root mean square normalization (Zhang and Sennrich 2019) over the last dimension, computed in fp32."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_norm_case(*shape: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        generator = torch.Generator().manual_seed(sum(shape))
        x = torch.randn(shape, generator=generator)
        weight = torch.rand(shape[-1], generator=generator) + 0.5
        return x.to(dtype), weight.to(dtype), 1e-5

    return Case("x".join(map(str, shape)), make)


NORM_TOLERANCES = {
    torch.float32: Tolerance(2e-6, 2e-6, "order of one sum over the row"),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2, "one rounding to 8 bits, twice where the scaled row is rounded first"),
    torch.float16: Tolerance(2e-3, 1e-3, "one rounding to 11 bits, twice where the scaled row is rounded first"),
}


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 inside; the scaled row is rounded to x's dtype before the weight, as the checkpoints were trained."""
    wide = x if x.dtype == torch.float32 else x.float()
    # vector_norm is one pass without a temporary of x's size: half the time of F.rms_norm on a CPU
    mean_square: Tensor = torch.linalg.vector_norm(wide, 2, -1, True).square_().mul_(1.0 / x.shape[-1])
    scaled: Tensor = wide * mean_square.add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return scaled.mul_(weight)
    return scaled.to(x.dtype) * weight


@op(
    cases=[make_norm_case(1, 576), make_norm_case(16, 4096), make_norm_case(7, 3, 64), make_norm_case(0, 576)],
    tolerances=NORM_TOLERANCES,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: [..., N]; weight: [N], x's dtype; returns a new tensor like x."""
    return normalized(x, weight, eps)

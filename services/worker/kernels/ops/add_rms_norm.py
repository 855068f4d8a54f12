"""Residual add and RMS normalization in one op: two memory passes less where a provider fuses them."""

import torch
from torch import Tensor

from services.worker.kernels.ops.rms_norm import NORM_TOLERANCES, normalized
from services.worker.kernels.registry import Case, op


def make_add_norm_case(*shape: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
        generator = torch.Generator().manual_seed(sum(shape))
        x, residual = torch.randn(2, *shape, generator=generator).to(dtype).unbind(0)
        weight = torch.rand(shape[-1], generator=generator) + 0.5
        return x, residual, weight.to(dtype), 1e-5

    return Case("x".join(map(str, shape)), make)


@op(
    cases=[make_add_norm_case(1, 576), make_add_norm_case(33, 1024), make_add_norm_case(0, 576)],
    tolerances=NORM_TOLERANCES,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). x, residual: [T, N]; weight: [N]; returns two new [T, N] tensors."""
    total = x + residual
    return normalized(total, weight, eps), total

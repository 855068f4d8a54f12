"""A projection and the norm ahead of it: AITER's norm, then its tuned GEMM."""

from torch import Tensor

from services.worker.kernels.impl.aiter._gemm import MM, product
from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed, refuses_norm
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.registry import Facts, Impl


def norm_and_product(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(normed(x, norm, eps), weight, bias)


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, RMS_NORM, MM)


IMPL = Impl(norm_linear, "aiter", norm_and_product, refuses)

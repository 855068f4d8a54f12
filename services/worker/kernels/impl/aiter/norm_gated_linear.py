"""The first half of a gated MLP: AITER's norm, its tuned GEMM, its gate."""

from torch import Tensor

from services.worker.kernels.impl.aiter._gate import GELU, SILU, gated
from services.worker.kernels.impl.aiter._gemm import MM, product
from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed, refuses_norm
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.registry import Facts, Impl


def norm_product_and_gate(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return gated(product(normed(x, norm, eps), weight, bias), activation)


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, RMS_NORM, MM, SILU, GELU)


IMPL = Impl(norm_gated_linear, "aiter", norm_product_and_gate, refuses)

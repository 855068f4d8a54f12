"""A projection onto the residual stream: AITER's tuned GEMM, then the sum (it has no GEMM that accumulates)."""

from torch import Tensor

from services.worker.kernels.impl.aiter._gemm import MM, product
from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.registry import Facts, Impl


def product_and_sum(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    residual.add_(product(x, weight, bias))


def refuses(facts: Facts) -> str | None:
    return refusal(facts, MM)


IMPL = Impl(add_linear, "aiter", product_and_sum, refuses)

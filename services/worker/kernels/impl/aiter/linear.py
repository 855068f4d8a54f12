"""The dense product by AITER's tuned GEMM."""

from services.worker.kernels.impl.aiter._gemm import MM, product
from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.registry import Facts, Impl


def refuses(facts: Facts) -> str | None:
    return refusal(facts, MM)


IMPL = Impl(linear, "aiter", product, refuses)

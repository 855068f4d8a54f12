"""SwiGLU's gate by AITER."""

from torch import Tensor

from services.worker.kernels.impl.aiter._gate import SILU, gated
from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Facts, Impl


def silu_gate(x: Tensor) -> Tensor:
    return gated(x, "silu")


def refuses(facts: Facts) -> str | None:
    return refusal(facts, SILU)


IMPL = Impl(silu_and_mul, "aiter", silu_gate, refuses)

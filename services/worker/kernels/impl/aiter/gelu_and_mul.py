"""GEGLU's gate by AITER, the tanh form."""

from torch import Tensor

from services.worker.kernels.impl.aiter._gate import GELU, gated
from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.registry import Facts, Impl


def gelu_gate(x: Tensor) -> Tensor:
    return gated(x, "gelu_tanh")


def refuses(facts: Facts) -> str | None:
    return refusal(facts, GELU)


IMPL = Impl(gelu_and_mul, "aiter", gelu_gate, refuses)

"""Numbers of 8 bits with one scale by AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.quantize_tensor import quantize_tensor
from services.worker.kernels.registry import Facts, Impl

WHOLE = Function("aiter:per_tensor_quant_hip", needs=("x", "quant_dtype"), twin=_triton.WHOLE)


def whole(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers, scale = WHOLE(x=x.contiguous(), quant_dtype=dtype)
    return numbers, scale


def refuses(facts: Facts) -> str | None:
    return refusal(facts, WHOLE)


IMPL = Impl(quantize_tensor, "aiter", whole, refuses)

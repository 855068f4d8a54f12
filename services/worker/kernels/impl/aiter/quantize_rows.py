"""Numbers of 8 bits with a scale per token by AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.quantize_rows import quantize_rows
from services.worker.kernels.registry import Facts, Impl

# its own default is int8, so the type is always said
BY_TOKEN = Function("aiter:per_token_quant_hip", needs=("x", "quant_dtype"), twin=_triton.BY_TOKEN)


def by_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not len(x):
        return quantize_rows.meaning(x, dtype)
    numbers, scales = BY_TOKEN(x=x.contiguous(), quant_dtype=dtype)
    return numbers, scales


def refuses(facts: Facts) -> str | None:
    return refusal(facts, BY_TOKEN)


IMPL = Impl(quantize_rows, "aiter", by_token, refuses)

"""RMS normalization and 8-bit numbers with a scale per token in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._norm import refuses_norm
from services.worker.kernels.ops.norm_quantize_rows import norm_quantize_rows
from services.worker.kernels.registry import Facts, Impl

NORM = Function(
    "aiter:rmsnorm2d_fwd_with_dynamicquant",
    needs=("out", "input", "yscale", "weight", "epsilon"),
    twin=_triton.NORM_QUANTIZE,
)


def normed_and_quantized(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        NORM(out=numbers, input=x.contiguous(), yscale=scales, weight=norm, epsilon=eps)
    return numbers, scales


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, NORM)


IMPL = Impl(norm_quantize_rows, "aiter", normed_and_quantized, refuses)

"""SwiGLU's gate and fp8 numbers with a scale per token and group in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.silu_quantize_groups import silu_quantize_groups
from services.worker.kernels.registry import Facts, Impl

GATE = Function("aiter:silu_and_mul_quant", needs=("out", "input", "scale", "group_size", "shuffle_scale"))
WIDEST = 8192  # what AITER's kernel is built for; wider gates are Triton's or two ops


def gated_and_quantized(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    num_tokens, width = len(x), x.shape[1] // 2
    if not num_tokens or width > WIDEST:
        return silu_quantize_groups.meaning(x, dtype, group, by_column)
    numbers = torch.empty((num_tokens, width), dtype=dtype, device=x.device)
    scales = torch.empty((num_tokens, width // group), dtype=torch.float32, device=x.device)
    GATE(out=numbers, input=x.contiguous(), scale=scales, group_size=group, shuffle_scale=by_column)
    return numbers, scales.view(scales.shape[::-1]) if by_column else scales


def refuses(facts: Facts) -> str | None:
    return refusal(facts, GATE)


IMPL = Impl(silu_quantize_groups, "aiter", gated_and_quantized, refuses)

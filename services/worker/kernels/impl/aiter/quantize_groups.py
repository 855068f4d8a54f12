"""Numbers of fp8 with a scale per token and group by AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.quantize_groups import quantize_groups
from services.worker.kernels.registry import Facts, Impl

BY_GROUP = Function(
    "aiter:per_group_quant_hip",
    needs=("x", "quant_dtype", "group_size", "transpose_scale"),
    twin=_triton.BY_GROUP,
)


def by_group(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    if not len(x):
        return quantize_groups.meaning(x, dtype, group, by_column)
    numbers, scales = BY_GROUP(x=x.contiguous(), quant_dtype=dtype, group_size=group, transpose_scale=by_column)
    # AITER keeps the shape [T, groups] and writes column after column
    return numbers, scales.view(scales.shape[::-1]) if by_column else scales


def refuses(facts: Facts) -> str | None:
    return refusal(facts, BY_GROUP)


IMPL = Impl(quantize_groups, "aiter", by_group, refuses)

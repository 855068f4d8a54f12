"""The gate of a SwiGLU MLP and the fp8 form of its result, a scale per token and group: nothing wide is stored."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_groups import by_group
from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.packing.fnuz import native_fp8
from services.worker.kernels.registry import Case, op


def make_silu_quantize_case(num_tokens: int, width: int, by_column: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, torch.dtype, int, bool]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        x = torch.randn(num_tokens, 2 * width, generator=generator) * 16  # scales near 1, see quantize_rows
        return x.to(dtype), native_fp8(), 128, by_column

    return Case(f"{num_tokens}x{width}{'c' if by_column else ''}", make)


@op(
    cases=[
        make_silu_quantize_case(1, 1536, True),
        make_silu_quantize_case(19, 256, False),
        make_silu_quantize_case(7, 768, True),
        make_silu_quantize_case(0, 256, True),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def silu_quantize_groups(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    """quantize_groups(silu_and_mul(x), dtype, group, by_column). x: [T, 2I], I a multiple of `group`."""
    return by_group(silu_and_mul.meaning(x), dtype, group, by_column)

"""RMS normalization and the fp8 form of its result, a scale per token and group: the normed row is never stored."""

import torch
from torch import Tensor

from services.worker.kernels.ops.norm_quantize_rows import make_norm_quantize_case
from services.worker.kernels.ops.quantize_groups import by_group
from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Case, op


def make_norm_groups_case(num_tokens: int, width: int, by_column: bool) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float, torch.dtype, int, bool]:
        return *make_norm_quantize_case(num_tokens, width).make(dtype), 128, by_column

    return Case(f"{num_tokens}x{width}{'c' if by_column else ''}", make)


@op(
    cases=[
        make_norm_groups_case(1, 4096, True),
        make_norm_groups_case(33, 1024, False),
        make_norm_groups_case(7, 512, True),
        make_norm_groups_case(0, 256, True),
    ],
    tolerances=QUANTIZE_TOLERANCES,
)
def norm_quantize_groups(
    x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, group: int, by_column: bool
) -> tuple[Tensor, Tensor]:
    """quantize_groups(rms_norm(x, norm, eps), dtype, group, by_column). x: [T, N]; norm: [N]."""
    return by_group(normalized(x, norm, eps), dtype, group, by_column)

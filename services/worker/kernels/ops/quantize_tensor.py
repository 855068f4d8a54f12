"""Activations to 8 bits while serving: one scale for the whole step. Coarse; some checkpoints were made for it."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES, make_quantize_case, quantized
from services.worker.kernels.registry import op


@op(
    cases=[make_quantize_case(1, 4096), make_quantize_case(5, 576), make_quantize_case(33, 2048, torch.int8)],
    tolerances=QUANTIZE_TOLERANCES,
)
def quantize_tensor(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, N], T > 0, as numbers of `dtype` (see quantize_rows) [T, N] and one fp32 scale [1]."""
    numbers, scale = quantized(x.flatten(), dtype)
    return numbers.view_as(x), scale

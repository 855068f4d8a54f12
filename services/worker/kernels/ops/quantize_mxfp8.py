"""Activations to MXFP8 while serving: one power of two per token and 32 columns (OCP MX 1.0)."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import QUANTIZE_TOLERANCES, make_quantize_case
from services.worker.kernels.packing.mx import encode_mxfp8
from services.worker.kernels.registry import op


@op(
    cases=[make_quantize_case(1, 4096), make_quantize_case(33, 576), make_quantize_case(0, 256)],
    tolerances=QUANTIZE_TOLERANCES,
)
def quantize_mxfp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, N], N a multiple of 32, as fp8 numbers of `dtype` [T, N] and uint8 scales [T, N / 32] (no tiles).

    A scale is the least power of two under which nothing exceeds the dtype's largest number.
    """
    return encode_mxfp8(x, dtype)

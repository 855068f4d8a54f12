"""Activations to MXFP4 while serving: one power of two per token and 32 columns (OCP MX 1.0)."""

import torch
from torch import Tensor

from services.worker.kernels.packing.mx import encode_mxfp4, tile_scales
from services.worker.kernels.registry import Case, Tolerance, op


def make_mxfp4_case(num_tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        return ((torch.randn(num_tokens, width, generator=generator) * 3).to(dtype),)

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[  # whole tiles of scales: what lies in the padding of others is nobody's business
        make_mxfp4_case(256, 256),
        make_mxfp4_case(512, 2304),
        make_mxfp4_case(0, 256),
    ],
    tolerances={
        dtype: Tolerance(0.0, 0.0, "divisions by powers of two are exact, ties go to even")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, N], N a multiple of 32, as uint8 [T, N / 2] and scales in tiles (see packing.mx.tile_scales).

    The scales of rows and columns that are not there may be anything.
    """
    packed, scales = encode_mxfp4(x)
    return packed, tile_scales(scales)

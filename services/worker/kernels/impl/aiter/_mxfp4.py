"""What AITER's MXFP4 calls share: gfx950 alone has the units, and AITER names torch's types where torch has them."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.registry import Facts

FP4X2: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)


def as_scales(tiles: Tensor) -> Tensor:
    """Tiles of scales under the padded matrix's shape, which is how AITER names them; no copy."""
    return tiles.view(tiles.shape[0] * 32, tiles.shape[1] * 8).view(E8M0)


def as_tiles(scales: Tensor) -> Tensor:
    """The way back."""
    return scales.view(torch.uint8).view(scales.shape[0] // 32, scales.shape[1] // 8, 4, 16, 2, 2)


def refuses_mxfp4(facts: Facts, *functions: Function) -> str | None:
    if facts.arch != "gfx950":
        return "MXFP4 needs gfx950"
    return refusal(facts, *functions, dtypes=(torch.bfloat16,))

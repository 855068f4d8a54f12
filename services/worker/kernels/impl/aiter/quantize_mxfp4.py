"""MXFP4 activations by AITER. Older releases round the scale otherwise and lack this name."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._mxfp4 import FP4X2, as_tiles, refuses_mxfp4
from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.registry import Facts, Impl

MX = Function("aiter:per_1x32_mx_quant_hip", needs=("x", "quant_dtype", "shuffle"))


def mx(x: Tensor) -> tuple[Tensor, Tensor]:
    if not len(x):
        return quantize_mxfp4.meaning(x)
    packed, scales = MX(x=x.contiguous(), quant_dtype=FP4X2, shuffle=True)
    return packed.view(torch.uint8), as_tiles(scales)


def refuses(facts: Facts) -> str | None:
    return refuses_mxfp4(facts, MX)


IMPL = Impl(quantize_mxfp4, "aiter", mx, refuses)

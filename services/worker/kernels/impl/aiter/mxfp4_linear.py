"""Products of MXFP4 numbers by AITER. Older releases want the result's memory as an argument, and are refused."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._mxfp4 import FP4X2, as_scales, refuses_mxfp4
from services.worker.kernels.ops.mxfp4_linear import mxfp4_linear
from services.worker.kernels.packing.weight_tiles import as_matrix
from services.worker.kernels.registry import Facts, Impl

MM = Function("aiter:gemm_a4w4", needs=("A", "B", "A_scale", "B_scale", "dtype"))


def scaled(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    if not len(x):
        return mxfp4_linear.meaning(x, scales, weight, weight_scales, dtype)
    product: Tensor = MM(
        A=x.view(FP4X2),
        B=as_matrix(weight).view(FP4X2),
        A_scale=as_scales(scales),
        B_scale=as_scales(weight_scales),
        dtype=dtype,
    )
    return product


def refuses(facts: Facts) -> str | None:
    return refuses_mxfp4(facts, MM)


IMPL = Impl(mxfp4_linear, "aiter", scaled, refuses)

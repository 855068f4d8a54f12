"""Products of fp8 numbers with a scale per block by AITER, from plain and from tiled weights.

AITER has two names for these; the `isBpreshuffled` of the first is broken in every release that has it.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.block_scaled_linear import block_scaled_linear
from services.worker.kernels.packing.weight_tiles import as_matrix
from services.worker.kernels.registry import Facts, Impl

OPERANDS = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
PLAIN = Function("aiter:gemm_a8w8_blockscale", needs=OPERANDS, twin=_triton.GEMM_BLOCKS)
TILED = Function("aiter:gemm_a8w8_blockscale_bpreshuffle", needs=OPERANDS)


def scaled(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    if not len(x):
        return block_scaled_linear.meaning(x, scales, weight, weight_scales, dtype)
    product: Tensor
    if weight.dim() == 2:
        product = PLAIN(XQ=x, WQ=weight, x_scale=scales, w_scale=weight_scales, dtype=dtype)
        return product
    # the memory of [in / 128, T] under the shape [T, in / 128], as AITER's quantizers leave it
    by_column = scales.view(scales.shape[::-1])
    product = TILED(XQ=x, WQ=as_matrix(weight), x_scale=by_column, w_scale=weight_scales, dtype=dtype)
    return product


def refuses(facts: Facts) -> str | None:
    return refusal(facts, PLAIN, TILED)


IMPL = Impl(block_scaled_linear, "aiter", scaled, refuses)

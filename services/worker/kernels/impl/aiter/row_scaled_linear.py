"""Products of 8-bit numbers with a scale per token and per row by AITER, from plain and from tiled weights."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.row_scaled_linear import row_scaled_linear
from services.worker.kernels.packing.weight_tiles import as_matrix
from services.worker.kernels.registry import Facts, Impl

OPERANDS = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
PLAIN = Function("aiter:gemm_a8w8", needs=(*OPERANDS, "bias"), twin=_triton.GEMM_8)
TILED = Function("aiter:gemm_a8w8_bpreshuffle", needs=OPERANDS)  # refuses a bias


def scaled(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if not len(x):
        return row_scaled_linear.meaning(x, scales, weight, weight_scales, bias, dtype)
    product: Tensor
    if weight.dim() == 2:
        product = PLAIN(XQ=x, WQ=weight, x_scale=scales, w_scale=weight_scales.view(1, -1), dtype=dtype, bias=bias)
        return product
    product = TILED(XQ=x, WQ=as_matrix(weight), x_scale=scales, w_scale=weight_scales, dtype=dtype)
    return product if bias is None else product.add_(bias)


def refuses(facts: Facts) -> str | None:
    return refusal(facts, PLAIN, TILED)


IMPL = Impl(row_scaled_linear, "aiter", scaled, refuses)

"""Rows to 8 bits by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.quantize_rows import quantize_rows
from services.worker.kernels.registry import Impl


def run(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _quantize.launch(x, dtype)[:2]


IMPL = Impl(quantize_rows, "triton", run, needs_gpu)
AOT = (_quantize.aot_case("quantize_rows", 14336),)

"""Residual add, RMS norm and 8 bits per row by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.add_norm_quantize_rows import add_norm_quantize_rows
from services.worker.kernels.registry import Impl


def run(x: Tensor, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize.launch(x, dtype, norm=(norm, eps), residual=residual)


IMPL = Impl(add_norm_quantize_rows, "triton", run, needs_gpu)

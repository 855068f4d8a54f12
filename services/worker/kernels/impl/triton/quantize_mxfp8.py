"""Rows to MXFP8 by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.quantize_mxfp8 import quantize_mxfp8
from services.worker.kernels.registry import Impl


def run(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _quantize.launch_mx(x, dtype)


IMPL = Impl(quantize_mxfp8, "triton", run, needs_gpu)
AOT = (_quantize.aot_mx(4096, four_bits=False),)

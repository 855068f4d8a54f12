"""A step's activations to 8 bits under one scale by the kernels of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.quantize_tensor import quantize_tensor
from services.worker.kernels.registry import Impl


def run(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _quantize.launch_tensor(x, dtype)


IMPL = Impl(quantize_tensor, "triton", run, needs_gpu)
AOT = _quantize.aot_tensor()

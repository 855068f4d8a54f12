"""RMS norm and 8 bits per group by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.norm_quantize_groups import norm_quantize_groups
from services.worker.kernels.registry import Impl


def run(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    return _quantize.launch(x, dtype, group, by_column, norm=(norm, eps))[:2]


IMPL = Impl(norm_quantize_groups, "triton", run, needs_gpu)

"""Groups of columns to 8 bits by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.quantize_groups import quantize_groups
from services.worker.kernels.registry import Impl


def run(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    return _quantize.launch(x, dtype, group, by_column)[:2]


IMPL = Impl(quantize_groups, "triton", run, needs_gpu)

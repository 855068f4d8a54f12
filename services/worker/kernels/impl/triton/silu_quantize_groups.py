"""The gate of an MLP and 8 bits per group by the kernel of `_quantize`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.silu_quantize_groups import silu_quantize_groups
from services.worker.kernels.registry import Impl


def run(x: Tensor, dtype: torch.dtype, group: int, by_column: bool) -> tuple[Tensor, Tensor]:
    return _quantize.launch(x, dtype, group, by_column, gate=True)[:2]


IMPL = Impl(silu_quantize_groups, "triton", run, needs_gpu)
AOT = (_quantize.aot_case("silu_quantize_groups", 14336, 128, gate=True),)

"""Products of fp8 numbers with scales per 128 columns and block, by the kernels of `_narrow_plan`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow
from services.worker.kernels.ops.block_scaled_linear import block_scaled_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    inputs = Inputs(x, scales, by_column=weight.dim() > 2)
    return _narrow_plan.linear(inputs, Narrow("blocks", weight, weight_scales, group=128), dtype)


IMPL = Impl(block_scaled_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("blocks", ((6144, 4096),), (16,), x_type="fp8e4nv")

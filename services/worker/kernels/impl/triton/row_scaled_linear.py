"""Products of 8-bit numbers with a scale per token and per row, by the kernels of `_narrow_plan`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow
from services.worker.kernels.ops.row_scaled_linear import row_scaled_linear
from services.worker.kernels.registry import Impl


def run(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return _narrow_plan.linear(Inputs(x, scales, bias=bias), Narrow("rows", weight, weight_scales), dtype)


IMPL = Impl(row_scaled_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("rows", ((6144, 4096),), (1, 16, 2048), x_type="fp8e4nv")

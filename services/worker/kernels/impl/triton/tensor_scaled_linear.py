"""Products of fp8 numbers with one scale each, by the kernels of `_narrow_plan`."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow
from services.worker.kernels.ops.tensor_scaled_linear import tensor_scaled_linear
from services.worker.kernels.registry import Impl


def run(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    narrow = Narrow("rows", weight, weight_scale, row_scale=False)
    return _narrow_plan.linear(Inputs(x, scale, bias=bias), narrow, dtype)


IMPL = Impl(tensor_scaled_linear, "triton", run, needs_gpu)

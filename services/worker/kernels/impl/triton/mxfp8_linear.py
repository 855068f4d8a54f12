"""Products of MXFP8 numbers by the kernels of `_narrow_plan`; where a chip has no unit for them, in bf16."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow, needs_scaled_dot
from services.worker.kernels.ops.mxfp8_linear import mxfp8_linear
from services.worker.kernels.registry import Impl


def run(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    narrow = Narrow("mxfp8", weight, weight_scales, group=32)
    return _narrow_plan.linear(Inputs(x, scales, bias=bias), narrow, dtype)


IMPL = Impl(mxfp8_linear, "triton", run, needs_scaled_dot)
AOT = _narrow_ahead.aot_cases("mxfp8", ((6144, 4096),), (16,), x_type="fp8e4nv")

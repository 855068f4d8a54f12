"""Products of MXFP4 numbers by the kernels of `_narrow_plan`; where a chip has no unit for them, in bf16."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow, needs_fp4_unit
from services.worker.kernels.ops.mxfp4_linear import mxfp4_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _narrow_plan.linear(Inputs(x, scales), Narrow("mxfp4", weight, weight_scales, group=32), dtype)


IMPL = Impl(mxfp4_linear, "triton", run, needs_fp4_unit)
AOT = tuple(
    case
    for case in _narrow_ahead.aot_cases("mxfp4", ((6144, 4096),), (16,), x_type="u8", tiled=True)
    if "gfx950" in case.targets
)

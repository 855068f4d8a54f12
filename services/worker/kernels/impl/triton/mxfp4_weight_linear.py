"""Products with MXFP4 weights by the kernels of `_narrow_plan`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow, needs_halves
from services.worker.kernels.ops.mxfp4_weight_linear import mxfp4_weight_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    return _narrow_plan.linear(Inputs(x, bias=bias), Narrow("mxfp4", weight, weight_scales, group=32), x.dtype)


IMPL = Impl(mxfp4_weight_linear, "triton", run, needs_halves)
AOT = _narrow_ahead.aot_cases("mxfp4", ((6144, 4096),), (1, 16, 64))

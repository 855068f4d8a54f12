"""Products with weights of eight bits in groups, by the kernels of `_narrow_plan`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow
from services.worker.kernels.ops.int8_linear import int8_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    narrow = Narrow("int8", weight, scales, group=x.shape[1] // scales.shape[1])
    if narrow.group % 16:
        return int8_linear.meaning(x, weight, scales, bias)
    return _narrow_plan.linear(Inputs(x, bias=bias), narrow, x.dtype)


IMPL = Impl(int8_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("int8", ((6144, 4096),), (1, 16), group=32)

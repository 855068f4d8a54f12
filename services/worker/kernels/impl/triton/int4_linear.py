"""Products with weights of four bits in groups, by the kernels of `_narrow_plan`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_plan
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_plan import Inputs, Narrow
from services.worker.kernels.ops.int4_linear import int4_linear
from services.worker.kernels.registry import Impl


def run(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    narrow = Narrow("int4", weight, scales, zeros, x.shape[1] // scales.shape[1])
    if narrow.group % 32:
        return int4_linear.meaning(x, weight, scales, zeros, bias)
    return _narrow_plan.linear(Inputs(x, bias=bias), narrow, x.dtype)


IMPL = Impl(int4_linear, "triton", run, needs_gpu)
AOT = _narrow_ahead.aot_cases("int4", ((6144, 4096),), (1, 16, 64, 2048), group=128, zeros=True)

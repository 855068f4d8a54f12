"""A product with a weight of 8 or 4 bits onto the residual stream, by `_narrow_fused`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_ahead, _narrow_fused, _narrow_plan, _narrow_planes
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.add_narrow_linear import add_narrow_linear
from services.worker.kernels.registry import Impl


def run(residual: Tensor, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> None:
    narrow = _narrow_fused.narrow_of(weight, scales, zeros)
    if _narrow_fused.suits(narrow, x):
        _narrow_fused.add_to(residual, x, narrow, bias)
    else:
        add_narrow_linear.meaning(residual, x, weight, scales, zeros, bias)


IMPL = Impl(add_narrow_linear, "triton", run, needs_gpu)
STREAMED = _narrow_plan.Plan(1, 4, 16384, 8, dots=True, blocks=4)
AOT = (
    _narrow_planes.aot_case(14336, 128, False),
    _narrow_ahead.aot_case("mxfp4", STREAMED, 14336, "", 32, False, False, "", 0)._replace(name="mxfp4_blocks_1x14336"),
)

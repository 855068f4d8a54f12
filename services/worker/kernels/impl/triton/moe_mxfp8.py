"""Experts in MXFP8 by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe, _quantize
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow, needs_scaled_dot
from services.worker.kernels.ops.moe_mxfp8 import moe_mxfp8
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    residual: Tensor,
) -> None:
    up = Narrow("mxfp8", gate_up, gate_up_scales, group=32)
    out = Narrow("mxfp8", down, down_scales, group=32)
    _narrow_moe.run(
        Routed(x, weights, experts), up, out, residual, lambda values: _quantize.launch_mx(values, gate_up.dtype)
    )


IMPL = Impl(moe_mxfp8, "triton", run, needs_scaled_dot)

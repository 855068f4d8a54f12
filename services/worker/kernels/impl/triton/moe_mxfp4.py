"""Experts in MXFP4, with activations as they are, which is finer, by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow, needs_fp4_unit
from services.worker.kernels.ops.moe_mxfp4 import moe_mxfp4
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
    up = Narrow("mxfp4", gate_up, gate_up_scales, group=32)
    _narrow_moe.run(Routed(x, weights, experts), up, Narrow("mxfp4", down, down_scales, group=32), residual)


IMPL = Impl(moe_mxfp4, "triton", run, needs_fp4_unit)

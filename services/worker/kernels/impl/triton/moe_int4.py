"""Experts with weights of four bits in groups by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._moe_plan import Experts
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow
from services.worker.kernels.ops.moe_int4 import moe_int4
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    residual: Tensor,
) -> None:
    hidden = x.shape[1]
    up = Narrow("int4", gate_up, gate_up_scales, gate_up_zeros, hidden // gate_up_scales.shape[2])
    out = Narrow("int4", down, down_scales, down_zeros, down.shape[2] * 2 // down_scales.shape[2])
    if up.group % 32 or out.group % 32:
        moe_int4.meaning(
            x, weights, experts, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros, residual
        )
    else:
        _narrow_moe.run(Routed(x, weights, experts), up, out, residual)


IMPL = Impl(moe_int4, "triton", run, needs_gpu)
AOT = _narrow_moe.aot_cases("int4", Experts(128, 8, 2048, 768), (1,), group=128, zeros=True)

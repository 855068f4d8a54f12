"""Experts in 8 bits with a scale per row by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe, _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._moe_plan import Experts
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow
from services.worker.kernels.ops.moe_row_scaled import moe_row_scaled
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
    up, out = Narrow("rows", gate_up, gate_up_scales), Narrow("rows", down, down_scales)
    _narrow_moe.run(
        Routed(x, weights, experts), up, out, residual, lambda values: _quantize.launch(values, gate_up.dtype)[:2]
    )


IMPL = Impl(moe_row_scaled, "triton", run, needs_gpu)
AOT = _narrow_moe.aot_cases("rows", Experts(128, 8, 2048, 768), (16, 128), "fp8e4nv")

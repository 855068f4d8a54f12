"""Experts in fp8 with a scale per matrix by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe, _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow
from services.worker.kernels.ops.moe_tensor_scaled import moe_tensor_scaled
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
    up = Narrow("rows", gate_up, gate_up_scales, row_scale=False)
    out = Narrow("rows", down, down_scales, row_scale=False)
    _narrow_moe.run(
        Routed(x, weights, experts), up, out, residual, lambda values: _quantize.launch_tensor(values, gate_up.dtype)
    )


IMPL = Impl(moe_tensor_scaled, "triton", run, needs_gpu)

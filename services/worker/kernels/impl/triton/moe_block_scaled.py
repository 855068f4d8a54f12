"""Experts in fp8 with a scale per block of 128 by 128 by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe, _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow
from services.worker.kernels.ops.moe_block_scaled import moe_block_scaled
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
    up = Narrow("blocks", gate_up, gate_up_scales, group=128)
    out = Narrow("blocks", down, down_scales, group=128)
    _narrow_moe.run(
        Routed(x, weights, experts), up, out, residual, lambda values: _quantize.launch(values, gate_up.dtype, 128)[:2]
    )


IMPL = Impl(moe_block_scaled, "triton", run, needs_gpu)

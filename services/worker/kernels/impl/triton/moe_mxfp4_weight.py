"""Experts in MXFP4 with activations as they are by the kernels of `_narrow_moe`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_moe
from services.worker.kernels.impl.triton._moe_plan import Experts
from services.worker.kernels.impl.triton._narrow_moe import Routed
from services.worker.kernels.impl.triton._narrow_plan import Narrow, needs_halves
from services.worker.kernels.impl.triton.moe_gated import Biases
from services.worker.kernels.ops.moe_mxfp4_weight import moe_mxfp4_weight
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    residual: Tensor,
) -> None:
    up = Narrow("mxfp4", gate_up, gate_up_scales, group=32)
    out = Narrow("mxfp4", down, down_scales, group=32)
    biases = None if gate_up_bias is None or down_bias is None else Biases(gate_up_bias, down_bias)
    _narrow_moe.run(Routed(x, weights, experts), up, out, residual, biases=biases)


IMPL = Impl(moe_mxfp4_weight, "triton", run, needs_halves)
AOT = _narrow_moe.aot_cases("mxfp4", Experts(128, 8, 2048, 768), (16,))

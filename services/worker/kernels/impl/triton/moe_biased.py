"""Experts with biases and other gates: moe_gated's kernels, which take both."""

from torch import Tensor

from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._moe_plan import Experts, choose
from services.worker.kernels.impl.triton.moe_gated import Extras, run_plan
from services.worker.kernels.ops.moe_biased import moe_biased
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    residual: Tensor,
    activation: str,
) -> None:
    (num_tokens, top_k), (num_experts, hidden, inner) = experts.shape, down.shape
    if num_tokens:
        plan = choose(Experts(num_experts, top_k, hidden, inner), num_tokens, x.device, x.dtype)
        extras = Extras(activation, gate_up_bias, down_bias)
        run_plan(plan, x, weights, experts, gate_up, down, residual, extras)


IMPL = Impl(moe_biased, "triton", run, needs_gpu)

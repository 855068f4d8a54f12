"""Experts with biases and a bounded gate: moe_gated's kernels, which take both."""

from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu
from services.worker.kernels.impl.triton._moe_plan import Experts, choose
from services.worker.kernels.impl.triton.moe_gated import Biases, aot_few, aot_grouped, run_plan
from services.worker.kernels.ops.moe_clamped import moe_clamped
from services.worker.kernels.registry import Impl


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: Tensor,
) -> None:
    (num_tokens, top_k), (num_experts, hidden, inner) = experts.shape, down.shape
    if num_tokens:
        plan = choose(Experts(num_experts, top_k, hidden, inner), num_tokens, x.device, x.dtype)
        run_plan(plan, x, weights, experts, gate_up, down, residual, Biases(gate_up_bias, down_bias))


def _clamped(case: AotCase) -> AotCase:
    own: dict[str, Constant] = {"bias_ptr": "*bf16:16", "CLAMPED": True}
    return case._replace(signature={key: own.get(key, value) for key, value in case.signature.items()})


GPT_OSS_20B = Experts(32, 4, 2880, 2880)
AOT: tuple[AotCase, ...] = tuple(
    _clamped(case)
    for case in (
        *aot_few("gpt_oss_20b", GPT_OSS_20B),
        *aot_grouped("gpt_oss_20b", GPT_OSS_20B, 16),
        *aot_grouped("gpt_oss_20b", GPT_OSS_20B, 128),
    )
)
IMPL = Impl(moe_clamped, "triton", run, needs_gpu)

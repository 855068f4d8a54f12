"""Routing in groups of experts by softmax or sigmoid scores: the kernel of moe_route_biased without a bias."""

from torch import Tensor

from services.worker.kernels.impl.triton.moe_route_biased import aot_case, launch, refuses
from services.worker.kernels.ops.moe_route_grouped import moe_route_grouped
from services.worker.kernels.registry import Impl


def run(
    logits: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, softmax: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return launch(logits, None, (num_groups, top_groups, top_k), renormalize, softmax, scale)


AOT = (
    aot_case("deepseek_v2", 8, 20, 3, 6, softmax=True),
    aot_case("deepseek_v2_lite", 1, 64, 1, 6, softmax=True),
)
IMPL = Impl(moe_route_grouped, "triton", run, refuses)

"""Grouped top-k by AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF, Function, refusal
from services.worker.kernels.impl.aiter.moe_route import choice_of
from services.worker.kernels.ops.moe_route_grouped import moe_route_grouped
from services.worker.kernels.registry import Facts, Impl

ARGUMENTS = ("gating_output", "topk_weights", "topk_ids", "num_expert_group", "topk_group", "need_renorm")
GROUPED = Function("aiter:grouped_topk", needs=(*ARGUMENTS, "is_softmax", "routed_scaling_factor"))
GROUPS = (1, 2, 4, 8)  # how many AITER's kernels are built for


def refuses_groups(facts: Facts) -> str | None:
    """By facts num_expert_groups and num_experts, if they are known: what AITER's kernels can cut."""
    groups, experts = facts.shapes.get("num_expert_groups", 1), facts.shapes.get("num_experts", 8)
    if groups not in GROUPS:
        return f"{groups} groups of experts; AITER has kernels for 1, 2, 4 and 8"
    # four experts are read at once, and a vector may not lie in two groups
    return None if experts % (4 * groups) == 0 else f"{experts} experts in {groups} groups are no multiples of 4"


def routed(
    logits: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, softmax: bool, scale: float
) -> tuple[Tensor, Tensor]:
    weights, experts = choice_of(len(logits), top_k, logits.device)
    if len(logits):
        GROUPED(
            gating_output=logits.contiguous(),
            topk_weights=weights,
            topk_ids=experts,
            num_expert_group=num_groups,
            topk_group=top_groups,
            need_renorm=renormalize,
            is_softmax=softmax,
            routed_scaling_factor=scale,
        )
    return weights, experts


def refuses(facts: Facts) -> str | None:
    return refuses_groups(facts) or refusal(facts, GROUPED, dtypes=(*HALF, torch.float32))


IMPL = Impl(moe_route_grouped, "aiter", routed, refuses)

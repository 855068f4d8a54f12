"""Grouped top-k with a bias on the choice by AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF, Function, refusal
from services.worker.kernels.impl.aiter.moe_route import choice_of
from services.worker.kernels.impl.aiter.moe_route_grouped import ARGUMENTS, refuses_groups
from services.worker.kernels.ops.moe_route_biased import moe_route_biased
from services.worker.kernels.registry import Facts, Impl

BIASED = Function("aiter:biased_grouped_topk", needs=(*ARGUMENTS, "correction_bias", "routed_scaling_factor"))
MANY = 8192  # tokens: above some 212 per CU AITER takes another kernel, which renormalizes whatever is asked


def routed(
    logits: Tensor, bias: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if len(logits) > MANY and not renormalize:
        return moe_route_biased.meaning(logits, bias, num_groups, top_groups, top_k, renormalize, scale)
    weights, experts = choice_of(len(logits), top_k, logits.device)
    if len(logits):
        BIASED(
            gating_output=logits.contiguous(),
            correction_bias=bias,
            topk_weights=weights,
            topk_ids=experts,
            num_expert_group=num_groups,
            topk_group=top_groups,
            need_renorm=renormalize,
            routed_scaling_factor=scale,
        )
    return weights, experts


def refuses(facts: Facts) -> str | None:
    return refuses_groups(facts) or refusal(facts, BIASED, dtypes=(*HALF, torch.float32))


IMPL = Impl(moe_route_biased, "aiter", routed, refuses)

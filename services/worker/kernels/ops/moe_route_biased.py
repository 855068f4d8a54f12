"""Routing in groups of experts with a bias on the choice, not on the weight (DeepSeek-V3, balanced without a loss)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_route_grouped import (
    GROUPED_TOLERANCES,
    best_experts,
    clear_logits,
    scaled_weights,
)
from services.worker.kernels.packing.mx import grouped
from services.worker.kernels.registry import Case, Sizes, op


def make_biased_route_case(num_tokens: int, num_experts: int, groups: tuple[int, int], top_k: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, int, int, int, bool, float]:
        """Of many tokens those whose choice is clearest: the bias makes near ties."""
        logits = clear_logits(8 * num_tokens, num_experts).to(dtype)
        generator = torch.Generator().manual_seed(num_experts)
        bias = (torch.rand(num_experts, generator=generator) * 0.1).to(dtype)
        ordered = (logits.double().sigmoid() + bias.double()).sort(dim=-1, descending=True).values
        clear = (ordered[:, :-1] - ordered[:, 1:])[:, : 4 * top_k].amin(-1).topk(num_tokens).indices
        return logits[clear], bias, *groups, top_k, True, 2.5

    return Case(f"{num_tokens}x{num_experts}g{groups[1]}of{groups[0]}k{top_k}", make)


@op(
    cases=[
        make_biased_route_case(1, 256, (8, 4), 8),
        make_biased_route_case(5, 64, (4, 2), 6),
        make_biased_route_case(7, 32, (1, 1), 4),
        make_biased_route_case(0, 256, (8, 4), 8),
    ],
    tolerances=GROUPED_TOLERANCES,
)
def moe_route_biased(
    logits: Tensor, bias: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores are sigmoid(logits); the choice is by score + bias, a group's being the sum of its best two.

    logits: [T, E], E a multiple of num_groups with two experts each at least; bias: [E] of logits' dtype; weights are
    scores without bias, divided by their sum to `renormalize`, times `scale`. Returns weights float32 [T, K], in the
    order of choice, and experts int32 [T, K].
    """
    scores = logits.float().sigmoid()
    choice = scores + bias.float()
    group_scores = grouped(choice, choice.shape[1] // num_groups).topk(2, dim=-1).values.sum(-1)
    return scaled_weights(scores, best_experts(choice, group_scores, top_groups, top_k), renormalize, scale)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of mixtures in groups by sigmoid scores."""
    groups = shapes.get("expert_groups", 0)
    for tokens in sizes.all if groups and not shapes.get("softmax_groups") else ():
        counts = shapes["num_experts"], (groups, shapes["top_groups"]), shapes["top_k"]
        yield make_biased_route_case(tokens, *counts)

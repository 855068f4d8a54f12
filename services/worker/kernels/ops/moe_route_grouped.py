"""Routing in groups of experts (DeepSeek-V2): first the best groups, then the best experts of those."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from services.worker.kernels.packing.mx import grouped
from services.worker.kernels.registry import Case, Sizes, Tolerance, op

GROUPED_TOLERANCES = {
    dtype: Tolerance(1e-5, 1e-6, "approximations of exp, order of sums; experts are exact")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


def clear_logits(num_tokens: int, num_experts: int) -> Tensor:
    """fp32 [T, E]: a shuffled ladder per token, so that no approximation of exp may change the choice."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    steps = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)
    return (steps - num_experts / 2) * (8 / num_experts)


def make_grouped_route_case(
    num_tokens: int, num_experts: int, groups: tuple[int, int], top_k: int, renormalize: bool, softmax: bool
) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, int, int, int, bool, bool, float]:
        logits = clear_logits(num_tokens, num_experts).to(dtype)
        return logits, *groups, top_k, renormalize, softmax, 1.0 if renormalize else 16.0

    name = f"{num_tokens}x{num_experts}g{groups[1]}of{groups[0]}k{top_k}{'' if softmax else 's'}"
    return Case(name + ("" if renormalize else "u"), make)


def best_experts(choice: Tensor, group_scores: Tensor, top_groups: int, top_k: int) -> Tensor:
    """Per token the `top_k` experts of highest `choice` [T, E] inside the `top_groups` groups of highest score [T, G].

    Largest first, of equals the lower. Returns int64 [T, K].
    """
    num_tokens, num_groups = group_scores.shape
    chosen = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    open_groups = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=choice.device).scatter(1, chosen, True)
    closed = ~open_groups.repeat_interleave(choice.shape[1] // num_groups, dim=1)
    return choice.masked_fill(closed, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def scaled_weights(scores: Tensor, experts: Tensor, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * scale, experts.to(torch.int32)


@op(
    cases=[
        make_grouped_route_case(1, 160, (8, 3), 6, False, True),
        make_grouped_route_case(5, 64, (8, 4), 6, True, True),
        make_grouped_route_case(9, 32, (4, 2), 4, True, False),
        make_grouped_route_case(3, 16, (1, 1), 4, False, False),
        make_grouped_route_case(0, 64, (8, 4), 6, True, True),
    ],
    tolerances=GROUPED_TOLERANCES,
)
def moe_route_grouped(
    logits: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, softmax: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores are softmax or sigmoid of logits; a group's score is its best expert's; weights are scores * scale.

    logits: [T, E], E a multiple of num_groups; renormalize: the weights of a token are divided by their sum before
    `scale`. Returns weights float32 [T, K], largest first, and experts int32 [T, K].
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if softmax else wide.sigmoid()
    group_scores = grouped(scores, scores.shape[1] // num_groups).amax(-1)
    return scaled_weights(scores, best_experts(scores, group_scores, top_groups, top_k), renormalize, scale)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of mixtures in groups by softmax scores."""
    groups = shapes.get("expert_groups", 0)
    for tokens in sizes.all if groups and shapes.get("softmax_groups") else ():
        counts = shapes["num_experts"], (groups, shapes["top_groups"]), shapes["top_k"]
        yield make_grouped_route_case(tokens, *counts, bool(shapes.get("renormalize")), True)

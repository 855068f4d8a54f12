"""Top-k softmax by AITER. Of experts whose probabilities round to the same number it takes the lower."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF, Function, refusal
from services.worker.kernels.ops.moe_route import moe_route
from services.worker.kernels.registry import Facts, Impl

TOP_K = Function(
    "aiter:topk_softmax",
    needs=("topk_weights", "topk_indices", "token_expert_indices", "gating_output", "need_renorm"),
)


def choice_of(num_tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for weights float32 and experts int32, [T, K]."""
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    return weights, torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)


def routed(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, experts = choice_of(len(logits), top_k, logits.device)
    if len(logits):
        TOP_K(
            topk_weights=weights,
            topk_indices=experts,
            token_expert_indices=torch.empty_like(experts),  # its notes
            gating_output=logits.contiguous(),
            need_renorm=renormalize,
        )
    return weights, experts


def refuses(facts: Facts) -> str | None:
    return refusal(facts, TOP_K, dtypes=(*HALF, torch.float32))


IMPL = Impl(moe_route, "aiter", routed, refuses)

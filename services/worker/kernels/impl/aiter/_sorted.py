"""How AITER's Triton kernels for experts are told which pairs of token and expert there are."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function

SORT = Function("aiter.ops.triton.moe.moe_routing.routing:routing", needs=("logits", "n_expts_act"))
LEAST = 1e-30  # of a weight, so that its logarithm is above that of experts that were not chosen


def logits_of(weights: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """float32 [T, E] of which AITER's top-k chooses these experts, and whose softmax over them is their share."""
    logits = torch.full((len(weights), num_experts), float("-inf"), device=weights.device)
    return logits.scatter_(1, experts.long(), weights.clamp_min(LEAST).log())


def add_weighted(residual: Tensor, out: Tensor, weights: Tensor) -> None:
    """residual += out, whose weights sum to 1, as if by `weights`."""
    residual.addcmul_(out, weights.sum(-1, keepdim=True).to(out.dtype))

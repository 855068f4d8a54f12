"""Routing of a mixture of experts: which experts each token goes to, and with what weight."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_route_case(
    num_tokens: int, num_experts: int, top_k: int, renormalize: bool = True, tied: bool = False
) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, int, bool]:
        generator = torch.Generator().manual_seed(num_tokens + num_experts)
        logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
        return (logits.round() if tied else logits).to(dtype), top_k, renormalize

    name = f"{num_tokens}x{num_experts}k{top_k}{'' if renormalize else 's'}{'t' if tied else ''}"
    return Case(name, make)


@op(
    cases=[
        make_route_case(1, 128, 8),
        make_route_case(5, 8, 2),
        make_route_case(17, 60, 4, renormalize=False),
        make_route_case(3, 512, 10),
        make_route_case(9, 16, 6, tied=True),
        make_route_case(2, 4, 4, renormalize=False, tied=True),
        make_route_case(0, 128, 8),
    ],
    tolerances={
        dtype: Tolerance(3e-6, 1e-7, "approximations of exp, order of sums; experts are exact")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
def moe_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` largest of softmax(logits) per token, largest first, of equal logits the lower expert first.

    logits: [T, E], any dtype, computed in fp32; renormalize: the weights of a token are divided by their sum.
    Returns weights float32 [T, K] and experts int32 [T, K].
    """
    ordered, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    weights = ordered.softmax(dim=-1)[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), experts[:, :top_k].to(torch.int32)

"""RMS normalization, the router's product and the choice of experts in one op; its logits are never rounded."""

import torch
from torch import Tensor

from services.worker.kernels.ops.linear import linear
from services.worker.kernels.ops.moe_route import moe_route
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Case, Tolerance, op


def make_norm_route_case(
    num_tokens: int, hidden: int, num_experts: int, top_k: int, renormalize: bool = True, biased: bool = False
) -> Case:
    """Of many random tokens those whose choice is clearest: an implementation may sum in another order."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float, Tensor, Tensor | None, int, bool]:
        generator = torch.Generator().manual_seed(num_tokens + num_experts)
        x = torch.randn(8 * num_tokens, hidden, generator=generator)
        norm = (torch.rand(hidden, generator=generator) + 0.5).to(dtype)
        router = (torch.randn(num_experts, hidden, generator=generator) / hidden**0.5).to(dtype)
        bias = torch.randn(num_experts, generator=generator).to(dtype) if biased else None
        logits = rms_norm.meaning(x.to(dtype), norm, 1e-6).double() @ router.double().T
        logits = logits if bias is None else logits + bias.double()
        ordered = logits.sort(dim=-1, descending=True).values[:, : top_k + 1]
        clear = (ordered[:, :-1] - ordered[:, 1:]).amin(-1).topk(num_tokens).indices if num_tokens else slice(0)
        return x[clear].to(dtype), norm, 1e-6, router, bias, top_k, renormalize

    suffix = ("" if renormalize else "s") + ("b" if biased else "")
    return Case(f"{num_tokens}x{hidden}x{num_experts}k{top_k}{suffix}", make)


@op(
    cases=[
        make_norm_route_case(1, 256, 128, 8),
        make_norm_route_case(5, 100, 8, 2),
        make_norm_route_case(3, 64, 60, 4, renormalize=False),
        make_norm_route_case(50, 128, 20, 3),
        make_norm_route_case(2, 96, 30, 4, biased=True),
        make_norm_route_case(40, 72, 18, 4, biased=True),
        make_norm_route_case(0, 64, 8, 2),
    ],
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5, "order of sums over hidden, twice"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, "the normed row may differ in the last of 8 bits"),
        torch.float16: Tolerance(2e-3, 1e-3, "the normed row may differ in the last of 11 bits"),
    },
)
def norm_route(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """normed = rms_norm(x, norm, eps), and moe_route(normed @ router.T + bias), computed in fp32.

    x: [T, N]; norm: [N]; router: [E, N]; bias: [E]; one dtype. Returns normed [T, N], weights float32 and experts
    int32 [T, K].
    """
    normed = rms_norm.meaning(x, norm, eps)
    logits = linear.meaning(normed.float(), router.float(), None if bias is None else bias.float())
    weights, experts = moe_route.meaning(logits, top_k, renormalize)
    return normed, weights, experts

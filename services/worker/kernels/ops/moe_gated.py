"""The experts of a mixture: each token through the gated MLPs it was routed to, weighted, onto the residual stream."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Case, Tolerance, op


def make_moe_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, used: int = 0) -> Case:
    """`used`: only the first so many experts get tokens (0: all may)."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_tokens + num_experts)
        x = torch.randn(num_tokens, hidden, generator=generator)
        scores = torch.rand(num_tokens, used or num_experts, generator=generator)
        weights, experts = scores.topk(top_k, dim=-1)
        gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=generator) / hidden**0.5
        down = torch.randn(num_experts, hidden, inner, generator=generator) / inner**0.5
        residual = torch.randn(num_tokens, hidden, generator=generator) * 3
        return (
            x.to(dtype),
            (weights / weights.sum(-1, keepdim=True)),
            experts.to(torch.int32),
            gate_up.to(dtype),
            down.to(dtype),
            residual.to(dtype),
        )

    return Case(f"{num_tokens}x{num_experts}k{top_k}x{hidden}x{inner}{f'u{used}' if used else ''}", make)


def add_pairs(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    mlp: Callable[[int, Tensor], Tensor],
    residual: Tensor,
) -> None:
    """residual[t] += sum over k of weights[t, k] * mlp(e, x[t]), e = experts[t, k]; the sum is in fp32."""
    top_k = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    flat_weights = weights.flatten()
    for expert, pairs in enumerate(torch.split(order, counts)):
        if len(pairs):
            tokens = pairs // top_k
            y = mlp(expert, x.index_select(0, tokens)).float()
            total.index_add_(0, tokens, y.mul_(flat_weights.index_select(0, pairs)[:, None]))
    residual.add_(total)


@op(
    cases=[
        make_moe_case(1, 16, 8, 96, 32),
        make_moe_case(3, 8, 2, 64, 40),
        make_moe_case(2, 5, 3, 48, 20),
        make_moe_case(9, 8, 2, 128, 64),
        make_moe_case(20, 6, 2, 96, 72, used=2),
        make_moe_case(66, 2, 2, 64, 64),
        make_moe_case(0, 8, 2, 64, 32),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 3e-5, "order of sums over hidden and inner"),
        torch.bfloat16: Tolerance(2e-2, 6e-2, "gate, up and each expert's output rounded to 8 bits, or not"),
        torch.float16: Tolerance(3e-3, 1e-2, "gate, up and each expert's output rounded to 11 bits, or not"),
    },
    writes=("residual",),
    by_value=True,
)
def moe_gated(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> None:
    """residual[t] += sum over k of weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]), e = experts[t, k]; in place.

    x: [T, N]; weights: float32 [T, K]; experts: int32 [T, K], those of a token are distinct; gate_up: [E, 2I, N],
    gate rows first; down: [E, N, I]; residual: [T, N]; all contiguous. The sum is in fp32 and rounded once.
    """

    def mlp(expert: int, rows: Tensor) -> Tensor:
        return silu_and_mul.meaning(rows @ gate_up[expert].T) @ down[expert].T

    add_pairs(x, weights, experts, gate_up.shape[0], mlp, residual)

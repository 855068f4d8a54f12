"""The experts of gpt-oss: as moe_gated, with biases, and a gate that is bounded."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.moe_gated import add_pairs, make_moe_case, moe_gated
from services.worker.kernels.registry import Case, Sizes, op

SLOPE, LIMIT = 1.702, 7.0


def clamped_swiglu(x: Tensor) -> Tensor:
    """gate * sigmoid(SLOPE * gate) * (up + 1), gate at most LIMIT, up within it on both sides; computed in fp32.

    x: [T, 2I], gate first; returns a new [T, I].
    """
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * torch.sigmoid(SLOPE * gate) * (up + 1)).to(x.dtype)


def make_clamped_case(num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
    plain = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weights, experts, gate_up, down, residual = plain.make(dtype)
        generator = torch.Generator().manual_seed(num_tokens + hidden)
        # some gates and ups go beyond the limit
        up_bias = torch.randn(num_experts, 2 * inner, generator=generator) * 4
        down_bias = torch.randn(num_experts, hidden, generator=generator)
        return x, weights, experts, gate_up, up_bias.to(dtype), down, down_bias.to(dtype), residual

    return Case(plain.name, make)


@op(
    cases=[
        make_clamped_case(1, 16, 4, 96, 32),
        make_clamped_case(3, 8, 3, 64, 40),
        make_clamped_case(2, 5, 3, 48, 20),
        make_clamped_case(9, 8, 2, 128, 64),
        make_clamped_case(66, 4, 2, 72, 24),
        make_clamped_case(0, 8, 2, 64, 32),
    ],
    tolerances={
        dtype: limit._replace(relative=2 * limit.relative, absolute=4 * limit.absolute)
        for dtype, limit in moe_gated.tolerances.items()  # biases make gated numbers a few times as large
    },
    writes=("residual",),
    by_value=True,
)
def moe_clamped(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    residual: Tensor,
) -> None:
    """As moe_gated, with a bias behind each product, and clamped_swiglu between them.

    gate_up_bias: [E, 2I], gate first; down_bias: [E, N], weighted as the expert's output is; both of x's dtype.
    """

    def mlp(expert: int, rows: Tensor) -> Tensor:
        gated = clamped_swiglu(functional.linear(rows, gate_up[expert], gate_up_bias[expert]))
        return functional.linear(gated, down[expert], down_bias[expert])

    add_pairs(x, weights, experts, len(down), mlp, residual)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start. `sizes.all`: numbers of tokens."""
    for tokens in sizes.all if shapes.get("clamped") else ():
        yield make_clamped_case(
            tokens, shapes["num_experts"], shapes["top_k"], shapes["hidden_size"], shapes["expert_size"]
        )

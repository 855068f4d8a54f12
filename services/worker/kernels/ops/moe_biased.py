"""The experts of a mixture with what moe_gated has not: biases, and another gate than silu's."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.moe_gated import add_pairs, make_moe_case, moe_gated
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Case, op

# gpt-oss: gate * sigmoid(SLOPE * gate) * (up + 1), the gate at most LIMIT and up within -LIMIT and LIMIT
SLOPE, LIMIT = 1.702, 7.0


def clamped_swiglu(x: Tensor) -> Tensor:
    """x: [T, 2I], gate first; returns a new [T, I], computed in fp32."""
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * torch.sigmoid(SLOPE * gate) * (up + 1)).to(x.dtype)


GATES = {"silu": silu_and_mul.meaning, "clamped_swiglu": clamped_swiglu}


def make_biased_moe_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, activation: str = "clamped_swiglu"
) -> Case:
    plain = make_moe_case(num_tokens, num_experts, top_k, hidden, inner)

    def make(dtype: torch.dtype) -> tuple[Tensor | str, ...]:
        x, weights, experts, gate_up, down, residual = plain.make(dtype)
        generator = torch.Generator().manual_seed(num_tokens + hidden)
        # some gates and ups go beyond the limit
        up_bias = torch.randn(num_experts, 2 * inner, generator=generator) * 4
        down_bias = torch.randn(num_experts, hidden, generator=generator)
        return x, weights, experts, gate_up, up_bias.to(dtype), down, down_bias.to(dtype), residual, activation

    return Case(f"{plain.name}{activation}", make)


@op(
    cases=[
        make_biased_moe_case(1, 16, 4, 96, 32),
        make_biased_moe_case(3, 8, 3, 64, 40, "silu"),
        make_biased_moe_case(2, 5, 3, 48, 20),
        make_biased_moe_case(9, 8, 2, 128, 64),
        make_biased_moe_case(66, 4, 2, 72, 24, "silu"),
        make_biased_moe_case(70, 3, 2, 64, 64),
        make_biased_moe_case(0, 8, 2, 64, 32),
    ],
    tolerances={
        dtype: limit._replace(relative=2 * limit.relative, absolute=4 * limit.absolute)
        for dtype, limit in moe_gated.tolerances.items()  # biases make gated numbers a few times as large
    },
    writes=("residual",),
    by_value=True,
)
def moe_biased(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    residual: Tensor,
    activation: str,
) -> None:
    """As moe_gated, with a bias behind each product, and the gate by name: "silu" or "clamped_swiglu".

    gate_up_bias: [E, 2I], gate first; down_bias: [E, N], weighted as the expert's output is; both of x's dtype.
    """

    def mlp(expert: int, rows: Tensor) -> Tensor:
        up = functional.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        bias = None if down_bias is None else down_bias[expert]
        return functional.linear(GATES[activation](up), down[expert], bias)

    add_pairs(x, weights, experts, len(down), mlp, residual)


def model_cases(shapes: Mapping[str, int], sizes: Any) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start. `sizes.all`: numbers of tokens."""
    for tokens in sizes.all if shapes.get("moe_bias") else ():
        yield make_biased_moe_case(
            tokens, shapes["num_experts"], shapes["top_k"], shapes["hidden_size"], shapes["expert_size"]
        )

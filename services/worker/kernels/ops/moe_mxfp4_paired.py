"""The experts of moe_mxfp4_weight with each gate row next to its up row, so that one kernel multiplies and gates."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_mxfp4_weight import moe_mxfp4_weight
from services.worker.kernels.packing.mx import BIAS, GROUP
from services.worker.kernels.registry import Case, Sizes, op

DEVIATION = 2.9  # of e2m1's numbers, each as likely as any


def paired(rows: Tensor) -> Tensor:
    """[E, 2I, ...], gate rows first, as a new [E, 2I, ...] of gate and up rows in turn."""
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)


def unpaired(rows: Tensor) -> Tensor:
    """The way back."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def paired_case(plain: Case) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        x, weights, experts, gate_up, scales, bias, down, down_scales, down_bias, residual = plain.make(dtype)
        biases = (None, None) if bias is None else (paired(bias).float(), down_bias.float())
        up = paired(gate_up), paired(scales), biases[0]
        return x, weights, experts, *up, down, down_scales, biases[1], residual

    return Case(plain.name, make)


def make_paired_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, biased: bool = False
) -> Case:
    """With weights drawn as codes: to encode those of a whole model's layer takes a CPU minutes."""

    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        generator = torch.Generator().manual_seed(num_tokens + hidden)

        def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            words = torch.randint(-(1 << 63), (1 << 63) - 1, (num_experts, rows, columns // 16), generator=generator)
            scale = round(BIAS - math.log2(DEVIATION * columns**0.5))
            scales = torch.full((num_experts, rows, columns // GROUP), scale, dtype=torch.uint8)
            scales[..., ::2] += 1  # not all the same
            return words.view(torch.uint8), scales

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weights, experts = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=-1)
        gate_up, down = drawn(2 * inner, hidden), drawn(hidden, inner)
        # some gates and ups go beyond the limit
        up_bias = normal(num_experts, 2 * inner) * 4 if biased else None
        down_bias = normal(num_experts, hidden) if biased else None
        chosen = weights / weights.sum(-1, keepdim=True), experts.to(torch.int32)
        x, residual = normal(num_tokens, hidden).to(dtype), (normal(num_tokens, hidden) * 3).to(dtype)
        return x, *chosen, *gate_up, up_bias, *down, down_bias, residual

    return Case(f"{num_tokens}x{num_experts}k{top_k}x{hidden}x{inner}{'b' if biased else ''}c", make)


@op(
    cases=[paired_case(case) for case in moe_mxfp4_weight.cases],
    tolerances=moe_mxfp4_weight.tolerances,
    writes=("residual",),
    by_value=True,
)
def moe_mxfp4_paired(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
    residual: Tensor,
) -> None:
    """As moe_mxfp4_weight, with `paired` gate_up: uint8 [E, 2I, N / 2], its scales [E, 2I, N / 32] and bias [E, 2I].

    Biases are float32.
    """
    bias = None if gate_up_bias is None else unpaired(gate_up_bias)
    up = unpaired(gate_up), unpaired(gate_up_scales), bias
    moe_mxfp4_weight.meaning(x, weights, experts, *up, down, down_scales, down_bias, residual)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At the sizes of a model with such experts (gpt-oss), for the self-test at start. `sizes.all`: tokens."""
    hidden, inner = shapes.get("hidden_size", 0), shapes.get("expert_size", 0)
    if shapes.get("clamped") and not hidden % GROUP and not inner % GROUP:
        for tokens in sizes.all:
            yield make_paired_case(tokens, shapes["num_experts"], shapes["top_k"], hidden, inner, biased=True)

"""Experts of a mixture in 8 and 4 bits, by the kernels of `_narrow_plan` over pairs of a token and an expert.

For a few tokens each pair multiplies for itself, with x as wide as it is: finer than the formats that round it, and
two launches less. For more, pairs are sorted by expert (`_moe_grouped`), and x is rounded where its format says so.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.worker.kernels.impl.triton import _narrow_plan
from services.worker.kernels.impl.triton._dense import describe
from services.worker.kernels.impl.triton._launch import AotCase
from services.worker.kernels.impl.triton._moe_plan import FEW_PAIRS, FEW_TOKENS, Experts
from services.worker.kernels.impl.triton._narrow_plan import (
    WORD,
    Inputs,
    Narrow,
    Plan,
    launch_matrix,
    launch_vector,
)
from services.worker.kernels.impl.triton.moe_gated import Biases, Sorted, combine

Rounded = Callable[[Tensor], tuple[Tensor, Tensor]]


class Routed(NamedTuple):
    """Which tokens go where: x [T, N], weights fp32 and experts int32 [T, K]."""

    x: Tensor
    weights: Tensor
    experts: Tensor


def run(
    routed: Routed,
    gate_up: Narrow,
    down: Narrow,
    residual: Tensor,
    rounded: Rounded | None = None,
    biases: Biases | None = None,
) -> None:
    """residual += the experts' sum. `rounded`: x in 8 bits and its scales; None: x stays as it is."""
    num_tokens, top_k = routed.experts.shape
    whole = gate_up.shape[1] % WORD == 0 == down.shape[1] % WORD
    if whole and num_tokens <= FEW_TOKENS and num_tokens * top_k <= FEW_PAIRS:
        if num_tokens:
            run_few(routed, gate_up, down, residual, biases)
    else:
        run_grouped(routed, gate_up, down, residual, rounded, biases)


def run_few(routed: Routed, gate_up: Narrow, down: Narrow, residual: Tensor, biases: Biases | None = None) -> None:
    x, weights, experts = routed
    top_k, (double, hidden) = experts.shape[1], gate_up.shape
    device, inner = x.device, double // 2
    gated = torch.empty(experts.numel(), inner, dtype=x.dtype, device=x.device)
    out = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    up_bias, down_bias = biases or (None, None)
    activation = "silu" if biases is None else "clamped"
    plan = few_plan(gate_up, inner, hidden, True, device)
    launch_vector(Inputs(x, bias=up_bias), gate_up, gated, plan, False, activation, experts, top_k)
    plan = few_plan(down, hidden, inner, False, device)
    launch_vector(Inputs(gated, bias=down_bias), down, out, plan, experts=experts)
    combine(out, weights, residual)


def few_plan(weight: Narrow, out: int, inner: int, is_gated: bool, device: torch.device) -> Plan:
    return _narrow_plan.choose(weight.asked(1), 1, out, inner, weight.group, 2, is_gated, device)


def run_grouped(
    routed: Routed,
    gate_up: Narrow,
    down: Narrow,
    residual: Tensor,
    rounded: Rounded | None = None,
    biases: Biases | None = None,
) -> None:
    x, weights, experts = routed
    top_k, (double, hidden), num_experts = experts.shape[1], gate_up.shape, len(down.weight)
    inner, device, pairs = double // 2, x.device, experts.numel()
    block_m = min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, num_experts))))
    x_bytes = x.element_size() if rounded is None else 1
    up_bias, down_bias = biases or (None, None)
    plan = grouped_plan(gate_up, block_m, inner, hidden, x_bytes, True, device)
    ordered = Sorted(experts, num_experts, plan.block_m)
    gated = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    launch_matrix(
        inputs(x, up_bias, rounded), gate_up, gated, plan, ordered, top_k,
        activation="silu" if biases is None else "clamped",
    )  # fmt: skip
    plan = grouped_plan(down, block_m, hidden, inner, x_bytes, False, device)
    out = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    launch_matrix(inputs(gated, down_bias, rounded), down, out, plan, ordered)
    combine(out, weights, residual)


def grouped_plan(
    weight: Narrow, block_m: int, out: int, inner: int, x_bytes: int, is_gated: bool, device: torch.device
) -> Plan:
    asked = (weight.form, block_m, out, inner, weight.group, x_bytes, is_gated)
    chosen = _narrow_plan.choose(*asked, device)
    if chosen == _narrow_plan.WIDE:
        chosen = _narrow_plan.geometry(*asked, describe(device))  # of a mixture no weight is read by many rows
    return chosen._replace(parts=1)


def inputs(x: Tensor, bias: Tensor | None, rounded: Rounded | None) -> Inputs:
    numbers, scales = (x, None) if rounded is None else rounded(x)
    return Inputs(numbers, scales, bias=bias)


def aot_cases(
    form: str, shape: Experts, rows: Sequence[int], x_type: str = "", group: int = 32, zeros: bool = False
) -> tuple[AotCase, ...]:
    """Gate and up, of `rows` pairs of an expert; 1: the path without sorting, with x as it is."""
    return tuple(
        case
        for count in rows
        for case in _narrow_plan.aot_cases(
            form, ((shape.inner, shape.hidden),), (count,), x_type if count > 1 else "", group, zeros,
            activation="silu", experts=shape.num_experts,
        )
    )  # fmt: skip

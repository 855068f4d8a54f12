"""Experts of a mixture in 8 and 4 bits, by the kernels of `_narrow_plan` over pairs of a token and an expert.

For a few tokens each pair multiplies for itself, with x as wide as it is: finer than the formats that round it, and
two launches less. For more, pairs are sorted by expert (`_moe_sort`), and x is rounded where its format says so.
Where experts have many rows each, weights that a matrix unit does not take as they are get widened once for all of
them, as in `_narrow_widen`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.worker.kernels.impl.triton import _moe_plan, _narrow_ahead, _narrow_plan, _narrow_widen
from services.worker.kernels.impl.triton._dense import describe
from services.worker.kernels.impl.triton._launch import AotCase
from services.worker.kernels.impl.triton._moe_plan import FEW_PAIRS, FEW_TOKENS, Experts, Grouped
from services.worker.kernels.impl.triton._moe_sort import Sorted
from services.worker.kernels.impl.triton._narrow_plan import (
    WORD,
    Inputs,
    Narrow,
    Pairs,
    Plan,
    by_planes,
    launch_matrix,
    launch_vector,
)
from services.worker.kernels.impl.triton.moe_gated import Biases, combine, grouped_down, grouped_up

WIDE_FORMS = ("int4", "mxfp4")  # what the grouped kernel widens for each block of rows anew
WIDE_ROWS = 192  # of an expert: from here on widening once is cheaper
WIDE_NUMBERS = 1 << 29  # of one of a layer's two stacks, that widening takes memory for
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
    elif widens(gate_up, num_tokens * top_k) and routed.x.element_size() == 2:
        run_widened(routed, gate_up, down, residual, biases)
    else:
        run_grouped(routed, gate_up, down, residual, rounded, biases)


def widens(gate_up: Narrow, pairs: int) -> bool:
    """Whether so many pairs are multiplied with the widened weights, of which those of gate and up are the larger."""
    num_experts, (double, hidden) = len(gate_up.weight), gate_up.shape
    if gate_up.form not in WIDE_FORMS or gate_up.tiled:
        return False
    return pairs >= WIDE_ROWS * num_experts and num_experts * double * hidden <= WIDE_NUMBERS


def run_widened(routed: Routed, gate_up: Narrow, down: Narrow, residual: Tensor, biases: Biases | None = None) -> None:
    x, weights, experts = routed
    num_experts, (hidden, inner) = len(down.weight), down.shape
    shape = Experts(num_experts, experts.shape[1], hidden, inner)
    plan = _moe_plan.choose(shape, len(x), x.device, x.dtype)
    assert isinstance(plan, Grouped), "for many tokens"
    ordered = Sorted(experts, num_experts, plan.block_m)
    # one stack after the other: the second takes the first one's memory
    gated = grouped_up(plan.up, plan.block_m, ordered, x, shape.top_k, widened(gate_up, x.dtype), biases)
    out = grouped_down(plan.down, plan.block_m, ordered, gated, widened(down, x.dtype), biases)
    combine(out, weights, residual)


def widened(stack: Narrow, dtype: torch.dtype) -> Tensor:
    """[E, N, K]: the experts' rows lie one behind the other, and so do their scales."""
    rows, inner = stack.shape
    weight, scales, zeros = (part if part is None else part.flatten(0, 1) for part in stack[1:4])
    assert weight is not None and scales is not None
    shape = (len(stack.weight) * rows, inner)
    return _narrow_widen.launch(stack.form, weight, scales, zeros, stack.group, True, shape, dtype).view(
        -1, rows, inner
    )


def run_few(routed: Routed, gate_up: Narrow, down: Narrow, residual: Tensor, biases: Biases | None = None) -> None:
    x, weights, experts = routed
    top_k, (double, hidden) = experts.shape[1], gate_up.shape
    device, inner = x.device, double // 2
    gated = torch.empty(experts.numel(), inner, dtype=x.dtype, device=x.device)
    out = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    up_bias, down_bias = biases or (None, None)
    activation = "silu" if biases is None else "clamped"
    plan = few_plan(gate_up, inner, hidden, x.element_size(), True, device)
    launch_vector(Inputs(x, bias=up_bias), gate_up, gated, plan, False, activation, experts, top_k)
    plan = few_plan(down, hidden, inner, x.element_size(), False, device)
    launch_vector(Inputs(gated, bias=down_bias), down, out, plan, experts=experts)
    combine(out, weights, residual)


def few_plan(weight: Narrow, out: int, inner: int, x_bytes: int, is_gated: bool, device: torch.device) -> Plan:
    return _narrow_plan.choose(weight.asked(1), 1, out, inner, weight.group, x_bytes, is_gated, device)


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
    last = grouped_plan(down, block_m, hidden, inner, x_bytes, False, device)
    ordered = Sorted(experts, num_experts, plan.block_m)
    gated = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    planes = last.block_k if rounded is None and by_planes(Inputs(gated), down, last) else 0
    launch_matrix(
        inputs(x, up_bias, rounded), gate_up, gated, plan, Pairs(ordered, top_k, planes),
        activation="silu" if biases is None else "clamped",
    )  # fmt: skip
    out = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    launch_matrix(inputs(gated, down_bias, rounded)._replace(planes=planes), down, out, last, Pairs(ordered))
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
        for case in _narrow_ahead.aot_cases(
            form, ((shape.inner, shape.hidden),), (count,), x_type if count > 1 else "", group, zeros,
            activation="silu", experts=shape.num_experts,
        )
    )  # fmt: skip

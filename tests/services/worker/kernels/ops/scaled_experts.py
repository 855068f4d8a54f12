"""Experts of scaled weights held against the dense ones of the dequantized weights, in float64."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Op

Matrix = Callable[[int], Tensor]  # of one expert, float64 [out, in]
Dequantized = Callable[[Tensor, Tensor, int], Tensor]  # weights and scales of all experts, and which; [out, in]


def run(op: Op[Any], dequantized: Dequantized, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the op makes of the residual stream, and what it should."""
    x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual = case.make(dtype)
    wanted = by_token(
        (x, weights, experts, residual),
        lambda expert: dequantized(gate_up, gate_up_scales, expert),
        lambda expert: dequantized(down, down_scales, expert),
    )
    op.meaning(x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual)
    return residual, wanted


def by_token(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    gate_up: Matrix,
    down: Matrix,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum, token by token. inputs: x, weights, experts and residual; with biases the gate is gpt-oss's."""
    x, weights, experts, residual = inputs
    wanted, gate_up, down = residual.double(), cache(gate_up), cache(down)  # decoded once, though many tokens choose it
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            up = gate_up(expert) @ x[token].double()
            if biases is None:
                gate, value = up.chunk(2)
                wanted[token] += weight * (down(expert) @ (gate / (1 + (-gate).exp()) * value))
            else:
                gate, value = (up + biases[0][expert].double()).chunk(2)
                gate, value = gate.clamp(max=7.0), value.clamp(-7.0, 7.0)
                gated = gate / (1 + (-1.702 * gate).exp()) * (value + 1)
                wanted[token] += weight * (down(expert) @ gated + biases[1][expert].double())
    return wanted


def check(op: Op[Any], dequantized: Dequantized, rounding: float) -> None:
    """Activations are rounded too, so the sums differ by a part of their size: `rounding`."""
    for dtype in op.tolerances:
        for case in op.cases:
            got, wanted = run(op, dequantized, case, dtype)
            assert got.dtype == dtype
            if len(wanted):
                before = case.make(dtype)[-1].double()
                size = (wanted - before).square().mean().sqrt()
                assert (got.double() - wanted).square().mean().sqrt() < rounding * size + 0.01

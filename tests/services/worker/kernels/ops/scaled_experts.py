"""Experts of scaled weights held against the dense ones of the dequantized weights, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Op

Dequantized = Callable[[Tensor, Tensor, int], Tensor]  # weights and scales of all experts, and which; [out, in]


def run(op: Op[Any], dequantized: Dequantized, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the op makes of the residual stream, and what it should."""
    x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual = case.make(dtype)
    wanted = residual.double()
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            up = dequantized(gate_up, gate_up_scales, expert)
            gate, value = (up @ x[token].double()).chunk(2)
            gated = gate / (1 + (-gate).exp()) * value
            wanted[token] += weight * (dequantized(down, down_scales, expert) @ gated)
    op.meaning(x, weights, experts, gate_up, gate_up_scales, down, down_scales, residual)
    return residual, wanted


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

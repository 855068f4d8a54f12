"""Gate and up are the halves of norm_narrow_linear."""

import torch
from torch.nn import functional

from services.worker.kernels.ops.norm_gated_narrow_linear import norm_gated_narrow_linear
from services.worker.kernels.ops.norm_narrow_linear import norm_narrow_linear

GATES = {"silu": functional.silu, "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh")}


def test_is_the_formula() -> None:
    for case in norm_gated_narrow_linear.cases:
        *arguments, activation = case.make(torch.float32)
        gate, up = norm_narrow_linear.meaning(*arguments).double().chunk(2, -1)
        got = norm_gated_narrow_linear.meaning(*arguments, activation)
        torch.testing.assert_close(got.double(), GATES[activation](gate) * up, rtol=1e-4, atol=1e-4)

"""The gate reads halves of rows that lie apart, and stays finite far out."""

import numpy as np
import pytest
import torch

from services.worker.kernels.impl.triton._gate import launch
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.silu_and_mul import silu_and_mul

GATES = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


@pytest.mark.parametrize("activation", GATES)
def test_rows_may_lie_apart(device: torch.device, activation: str) -> None:
    wide = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    for x in (wide[:, 100:2700], wide[::2, :20], wide.t()[:6, :4]):
        got = launch(x, activation)
        torch.testing.assert_close(got, GATES[activation].meaning(x), rtol=4e-6, atol=2e-6)


@pytest.mark.parametrize("activation", GATES)
def test_far_values_stay_finite(device: torch.device, activation: str) -> None:
    gate = torch.tensor([[-1e12, -200.0, -87.5, -1e-8, 0.0, 1e-8, 87.5, 1e12]], device=device)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    with np.errstate(over="ignore"):  # exp(1e12) is infinite, and 1 / it zero
        got = launch(x, activation)
    torch.testing.assert_close(got, GATES[activation].meaning(x), rtol=4e-6, atol=1e-6)

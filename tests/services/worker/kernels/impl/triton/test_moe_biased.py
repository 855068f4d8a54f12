"""The Triton implementation of moe_biased against the op's meaning, in both plans."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_plan import Few, Grouped, Tile
from services.worker.kernels.impl.triton.moe_biased import IMPL
from services.worker.kernels.impl.triton.moe_gated import Extras, run_plan
from services.worker.kernels.ops.moe_biased import make_biased_moe_case, moe_biased
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


@pytest.mark.parametrize("plan", [Few(4, 64, 4, 4, 32, 4), Grouped(16, Tile(32, 16, 2, 4, 1), Tile(16, 32, 2, 4, 1))])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_each_bias_counts_in_each_plan(plan: Few | Grouped, left_out: int, device: torch.device) -> None:
    made = list(make_biased_moe_case(3, 4, 3, 40, 24).make(torch.float32))
    if left_out:
        made[{1: 4, 2: 6}[left_out]] = None
    given = [value.to(device) if isinstance(value, torch.Tensor) else value for value in made]
    x, weights, experts, gate_up, up_bias, down, down_bias, residual, activation = given
    residual = residual.clone()
    moe_biased.meaning(*made)
    run_plan(plan, x, weights, experts, gate_up, down, residual, Extras(activation, up_bias, down_bias))
    torch.testing.assert_close(residual.cpu(), made[7], rtol=2e-5, atol=2e-4)

"""The Triton implementation of moe_clamped against the op's meaning, in both plans."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_plan import Few, Grouped, Tile
from services.worker.kernels.impl.triton.moe_clamped import IMPL
from services.worker.kernels.impl.triton.moe_gated import Biases, run_plan
from services.worker.kernels.ops.moe_clamped import make_clamped_case, moe_clamped
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


@pytest.mark.parametrize("plan", [Few(4, 64, 4, 4, 32, 4), Grouped(16, Tile(32, 16, 2, 4, 1), Tile(16, 32, 2, 4, 1))])
def test_both_plans_where_no_size_divides_another(plan: Few | Grouped, device: torch.device) -> None:
    made = make_clamped_case(3, 4, 3, 40, 24).make(torch.float32)
    x, weights, experts, gate_up, up_bias, down, down_bias, residual = (value.to(device) for value in made)
    residual = residual.clone()
    moe_clamped.meaning(*made)
    run_plan(plan, x, weights, experts, gate_up, down, residual, Biases(up_bias, down_bias))
    torch.testing.assert_close(residual.cpu(), made[-1], rtol=2e-5, atol=2e-4)

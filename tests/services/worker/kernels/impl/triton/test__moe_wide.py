"""Products by descriptors, and blocks of few pairs in the products that have such."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_plan import Grouped, Tile
from services.worker.kernels.impl.triton.moe_gated import FLAT, Biases, run_grouped
from services.worker.kernels.ops.moe_clamped import make_clamped_case, moe_clamped
from services.worker.kernels.ops.moe_gated import make_moe_case, moe_gated

SHORT, WIDE, FULL = {"tail": 16}, {"wide": 1, "tail": 16}, {"wide": 1}


PLANS = [
    pytest.param(32, SHORT, SHORT, id="short"),
    pytest.param(32, WIDE, WIDE, id="wide"),
    pytest.param(32, FULL, {"wide": FLAT}, id="flat"),
    pytest.param(48, WIDE, WIDE, id="two parts"),
    pytest.param(48, FULL, {"wide": FLAT}, id="two parts, flat"),
]


@pytest.mark.parametrize(("block_m", "up", "down"), PLANS)
def test_blocks_full_and_short(block_m: int, up: dict[str, int], down: dict[str, int], device: torch.device) -> None:
    """Experts with more than a block, with a third of one and less, with two thirds, and with none."""
    case = make_moe_case(60, 5, 2, 72, 40, used=3)
    wanted = case.make(torch.float32)
    experts = wanted[2]
    experts[:, :] = torch.tensor([0, 2])
    experts[:5, 0] = 1
    experts[5:35, 1] = 3
    arguments = [value.clone().to(device) for value in wanted]
    moe_gated.meaning(*wanted)
    run_grouped(Grouped(block_m, Tile(16, 32, 2, 4, 2, **up), Tile(32, 16, 2, 4, 2, **down)), *arguments)
    torch.testing.assert_close(arguments[-1].cpu(), wanted[-1], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(("block_m", "first", "second"), [PLANS[0], *PLANS[2:4]])
def test_biases_and_the_clamped_gate(
    block_m: int, first: dict[str, int], second: dict[str, int], device: torch.device
) -> None:
    made = make_clamped_case(40, 4, 3, 40, 24).make(torch.float32)
    x, weights, experts, gate_up, up_bias, down, down_bias, residual = (value.clone().to(device) for value in made)
    moe_clamped.meaning(*made)
    plan = Grouped(block_m, Tile(16, 16, 3, 4, 2, **first), Tile(32, 16, 2, 4, 2, **second))
    run_grouped(plan, x, weights, experts, gate_up, down, residual, Biases(up_bias, down_bias))
    torch.testing.assert_close(residual.cpu(), made[-1], rtol=2e-5, atol=2e-4)

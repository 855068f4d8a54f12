"""Products of many tokens by expert, in any tiling."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_plan import Grouped, Tile
from services.worker.kernels.impl.triton.moe_gated import run_grouped
from services.worker.kernels.ops.moe_gated import make_moe_case, moe_gated


@pytest.mark.parametrize("block_m", [16, 32])
def test_any_tiling_gives_the_same(block_m: int, device: torch.device) -> None:
    case = make_moe_case(21, 3, 2, 80, 48)
    wanted = case.make(torch.float32)
    moe_gated.meaning(*wanted)
    for up, down in (
        (Tile(64, 32, 1, 4, 3), Tile(32, 16, 3, 4, 2)),
        (Tile(16, 16, 8, 4, 2), Tile(64, 64, 1, 4, 4)),
    ):
        arguments = [value.to(device) for value in case.make(torch.float32)]
        run_grouped(Grouped(block_m, up, down), *arguments)
        torch.testing.assert_close(arguments[-1].cpu(), wanted[-1], rtol=1e-5, atol=3e-5)

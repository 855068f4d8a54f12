"""Products of a few tokens in any tiling, also where no size divides another."""

import pytest
import torch

from services.worker.kernels.impl.triton._moe_plan import Few
from services.worker.kernels.impl.triton.moe_gated import run_few
from services.worker.kernels.ops.moe_gated import make_moe_case, moe_gated

PLANS = [
    Few(4, 128, 4, 4, 64, 4),
    Few(8, 16, 1, 2, 16, 2),
    Few(8, 64, 4, 8, 128, 4),
    Few(4, 64, 4, 4, 16, 4, 1),
    Few(4, 64, 4, 2, 32, 4, 2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_any_tiling_gives_the_same(plan: Few, device: torch.device) -> None:
    for sizes in ((2, 4, 3, 40, 24), (2, 3, 1, 64, 96)):
        case = make_moe_case(*sizes)
        wanted = case.make(torch.float32)
        moe_gated.meaning(*wanted)
        arguments = [value.to(device) for value in case.make(torch.float32)]
        run_few(plan, *arguments)
        torch.testing.assert_close(arguments[-1].cpu(), wanted[-1], rtol=1e-5, atol=3e-5)

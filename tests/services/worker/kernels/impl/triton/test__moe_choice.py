"""The choice of experts where logits are not what a sound model gives."""

import numpy as np
import torch

from services.worker.kernels.impl.triton.moe_route import IMPL


def test_odd_logits_give_experts_that_exist(device: torch.device) -> None:
    logits = torch.zeros(5, 6)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 4] = torch.inf
    logits[3] = torch.tensor([3e38, -3e38, 3e38, 0.0, 3e38, 1.0])
    logits[4, 5] = torch.nan
    with np.errstate(all="ignore"):  # numpy, which interprets, warns
        weights, experts = IMPL.run(logits.to(device), 3, True)
    assert all(0 <= expert < 6 for row in experts.tolist() for expert in row)
    assert experts[2, 0] == 4
    assert experts[3].tolist() == [0, 2, 4]
    torch.testing.assert_close(weights[3].cpu(), torch.full((3,), 1 / 3))

"""The Triton implementation of draw against the op's meaning."""

import torch

from services.worker.kernels.impl.triton.draw import IMPL
from tests.services.worker.kernels.impl.triton.hold import Holder, poisoned_allocations


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_odd_logits_give_ids_of_the_vocabulary(device: torch.device) -> None:
    """Rows of -inf, of NaN, with an infinity, and far ones."""
    size = 2500
    logits = torch.zeros(7, size)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, [9, 2000]] = torch.inf
    logits[3] = 3e38
    logits[4] = -3e38
    logits[5] = -torch.inf
    logits[5, 2499] = 1.0
    logits[6, 100] = torch.nan
    for temperature in (0.0, 1e-6, 0.7, 1e6):
        ones = torch.ones(7, device=device)
        numbers = torch.arange(7, device=device)
        with poisoned_allocations():
            got = IMPL.run(logits.to(device), ones * temperature, numbers, numbers).tolist()
        assert all(0 <= token < size for token in got), (temperature, got)
        assert got[2] == 9 and got[5] == 2499
        assert got[6] != 100

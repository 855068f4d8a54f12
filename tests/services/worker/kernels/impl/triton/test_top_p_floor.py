"""The Triton implementation of top_p_floor against the op's meaning."""

import torch

from services.worker.kernels.impl.triton.top_p_floor import IMPL
from services.worker.kernels.ops.top_p_floor import top_p_floor
from tests.services.worker.kernels.impl.triton.hold import Holder, poisoned_allocations


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_search_in_hard_rows(device: torch.device) -> None:
    """Many equals, values around zero of very different size, barred tokens, one value only."""
    generator = torch.Generator().manual_seed(5)
    size = 5000
    logits = torch.randn(6, size, generator=generator)
    logits[0] = (logits[0] * 2).round()
    logits[1] *= 10.0 ** -(torch.rand(size, generator=generator) * 30)
    logits[2, 1::2] = -torch.inf
    logits[3] = -7.0
    logits[4] *= 1e-30
    logits[5, 0] = 3e38
    ones = torch.ones(6)
    for top_p in (0.001, 0.5, 0.99):
        wanted = top_p_floor.meaning(logits, ones, ones * top_p)
        with poisoned_allocations():
            got = IMPL.run(logits.to(device), ones.to(device), ones.to(device) * top_p).cpu()
        for row in range(6):
            ordered = logits[row].double().sort(descending=True).values
            mass = torch.softmax(ordered, -1).cumsum(-1)
            kept = int((ordered >= got[row].double()).sum())
            assert bool((logits[row] == got[row]).any())
            if got[row] != wanted[row]:  # a border within rounding
                assert mass[kept - 1] >= top_p - 1e-6
                ties = int((ordered == got[row].double()).sum())
                assert kept == ties or mass[kept - ties - 1] < top_p + 1e-6

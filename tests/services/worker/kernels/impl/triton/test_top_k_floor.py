"""The Triton implementation of top_k_floor against the op's meaning."""

import torch

from services.worker.kernels.impl.triton.top_k_floor import IMPL
from services.worker.kernels.ops.top_k_floor import top_k_floor
from tests.services.worker.kernels.impl.triton.hold import Holder, poisoned_allocations


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_search_in_hard_rows(device: torch.device) -> None:
    """Many equals, values around zero of very different size, more asked than is finite, one value only."""
    generator = torch.Generator().manual_seed(5)
    size = 5000
    logits = torch.randn(5, size, generator=generator)
    logits[0] = (logits[0] * 2).round()
    logits[1] *= 10.0 ** -(torch.rand(size, generator=generator) * 30)
    logits[2, 7:] = -torch.inf
    logits[3] = -7.0
    logits[4] *= 1e-30
    ones = torch.ones(5)
    for k, top_p in ((1, 0.9), (9, 0.8), (4000, 0.5), (size, 1.0)):
        top_k = torch.full((5,), k)
        wanted = top_k_floor.meaning(logits, ones, top_k, ones * top_p, k)
        arguments = (tensor.to(device) for tensor in (logits, ones, top_k, ones * top_p))
        with poisoned_allocations():
            got = IMPL.run(*arguments, k).cpu()
        # where no rank bars a token the floor may be -inf: what it adds has no probability
        lowest = logits.masked_fill(logits == -torch.inf, torch.inf).amin(-1)
        assert torch.equal(torch.maximum(got, lowest), torch.maximum(wanted, lowest)), (k, top_p)

"""The choice of experts where logits are not what a sound model gives."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton._moe_choice import store_counted
from services.worker.kernels.impl.triton.moe_route import IMPL


@triton.jit
def _count_all(logits_ptr, weights_ptr, experts_ptr, EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    token, expert = tl.program_id(0), tl.arange(0, PAD)
    logits = tl.load(logits_ptr + token * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    store_counted(logits, token, weights_ptr, experts_ptr, EXPERTS, PAD, TOP_K, RENORMALIZE)


@pytest.mark.on_device
@pytest.mark.parametrize("renormalize", [False, True])
def test_counting_chooses_as_rounds_do(device: torch.device, renormalize: bool) -> None:
    """Also among equals, and what is no number: an expert that exists, and none twice."""
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[1].round()
    logits[2], logits[2, 3], logits[2, 9] = 0.0, -0.0, 1.0
    logits[3] = -torch.inf
    logits[4, 7], logits[4, 8] = torch.nan, -torch.inf
    logits[5] = torch.nan
    weights, experts = torch.full((6, 4), -1.0, device=device), torch.full((6, 4), -1, dtype=torch.int32, device=device)
    with np.errstate(all="ignore"):
        _count_all[(6,)](logits.to(device), weights, experts, 20, 32, 4, renormalize)
        wanted_weights, wanted = IMPL.run(logits.to(device), 4, renormalize)
    assert experts[:3].tolist() == wanted[:3].tolist()
    torch.testing.assert_close(weights[:3], wanted_weights[:3])
    for row in experts.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 20 for expert in row)


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

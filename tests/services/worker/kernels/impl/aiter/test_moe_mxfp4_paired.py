"""AITER's calls for moe_mxfp4_paired; the newer release alone has the kernels."""

import pytest
import torch

from services.worker.kernels.impl.aiter.moe_mxfp4_paired import IMPL
from services.worker.kernels.ops.moe_mxfp4_paired import make_paired_case, moe_mxfp4_paired
from tests.services.worker.kernels.impl.aiter.calls import check_calls, host, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD

REASON = "aiter.ops.triton.moe.moe_routing.routing cannot be imported: No module named 'aiter.ops.triton.moe'"


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_mxfp4_paired", monkeypatch, {OLD: REASON})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float16, torch.float32):
        assert refusal_of("moe_mxfp4_paired", monkeypatch, {}, dtype) == f"does not do {str(dtype)[6:]}"


@pytest.mark.parametrize("factor", [2.5, 0.3])
def test_weights_need_not_sum_to_one(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """AITER's do."""
    case = make_paired_case(7, 8, 3, 64, 32)
    got, wanted = case.make(torch.bfloat16), case.make(torch.bfloat16)
    got[1].mul_(factor), wanted[1].mul_(factor)
    moe_mxfp4_paired.meaning(*wanted)
    with host(monkeypatch, NEW, "gfx942"):
        IMPL.run(*got)
    torch.testing.assert_close(got[-1], wanted[-1], rtol=0.04, atol=0.16)
    assert not torch.allclose(got[-1], case.make(torch.bfloat16)[-1], atol=0.5)

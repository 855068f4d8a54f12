"""AITER's calls for moe_int4_whole, on both releases and architectures."""

import pytest
import torch

from services.worker.kernels.impl.aiter.moe_int4_whole import IMPL
from services.worker.kernels.ops.moe_int4 import make_int4_moe_case
from services.worker.kernels.ops.moe_int4_whole import moe_int4_whole, whole_case
from tests.services.worker.kernels.impl.aiter.calls import check_calls, host, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import NEW


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_int4_whole", monkeypatch)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("moe_int4_whole", monkeypatch, {}, torch.float32) == "does not do float32"


def test_one_expert_per_token_is_weighted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = whole_case(make_int4_moe_case(5, 4, 1, 64, 32, group=32))
    got, wanted = case.make(torch.bfloat16), case.make(torch.bfloat16)
    got[1].mul_(0.25), wanted[1].mul_(0.25)
    moe_int4_whole.meaning(*wanted)
    with host(monkeypatch, NEW, "gfx950"):
        IMPL.run(*got)
    torch.testing.assert_close(got[-1], wanted[-1], rtol=0.02, atol=0.08)

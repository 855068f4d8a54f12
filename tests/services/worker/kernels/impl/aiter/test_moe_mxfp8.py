"""AITER's calls for moe_mxfp8; the newer release alone has the kernels."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD
from tests.services.worker.kernels.impl.aiter.test_moe_mxfp4_paired import REASON


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_mxfp8", monkeypatch, {"gfx942": "MXFP8 needs gfx950", OLD: REASON})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("moe_mxfp8", monkeypatch, {}, torch.float16) == "does not do float16"

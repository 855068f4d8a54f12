"""AITER's call for norm_quantize_mxfp4, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "aiter.rmsnorm2d_fwd_with_dynamicquant of this host does not take group_size, shuffle_scale"
    check_calls("norm_quantize_mxfp4", monkeypatch, {"gfx942": "MXFP4 needs gfx950", OLD: old})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("norm_quantize_mxfp4", monkeypatch, {}, torch.float16) == "does not do float16"
    assert "not of 16384" in str(refusal_of("norm_quantize_mxfp4", monkeypatch, {"hidden_size": 16384}))

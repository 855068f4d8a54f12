"""AITER's call for mxfp4_linear, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(
        "mxfp4_linear",
        monkeypatch,
        {"gfx942": "MXFP4 needs gfx950", OLD: "aiter.gemm_a4w4 of this host does not take dtype"},
    )


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("mxfp4_linear", monkeypatch, {}, torch.float32) == "does not do float32"

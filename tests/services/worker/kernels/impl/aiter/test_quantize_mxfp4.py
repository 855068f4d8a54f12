"""AITER's call for quantize_mxfp4, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(
        "quantize_mxfp4",
        monkeypatch,
        {"gfx942": "MXFP4 needs gfx950", OLD: "this host has no aiter.per_1x32_mx_quant_hip"},
    )


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("quantize_mxfp4", monkeypatch, {}, torch.float32) == "does not do float32"

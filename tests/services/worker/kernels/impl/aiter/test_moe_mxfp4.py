"""AITER's call for moe_mxfp4, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_mxfp4", monkeypatch, {"gfx942": "MXFP4 needs gfx950"})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("moe_mxfp4", monkeypatch, {}, torch.float32) == "does not do float32"
    assert refusal_of("moe_mxfp4", monkeypatch, {"expert_size": 384, "hidden_size": 4096}) == (
        "experts of multiples of 256 both ways, not 384 by 4096"
    )

"""AITER's call for mla_decode, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("mla_decode", monkeypatch)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("mla_decode", monkeypatch, {}, torch.float32) == "does not do float32"
    assert refusal_of("mla_decode", monkeypatch, {"num_heads": 160}) == ("more than 128 heads")
    assert refusal_of("mla_decode", monkeypatch, {"verify_tokens": 8}) == (
        "rows of 8 tokens: AITER is wrong beyond 4 (ROCm/aiter#5679)"
    )

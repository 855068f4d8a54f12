"""AITER's call for silu_quantize_groups, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("silu_quantize_groups", monkeypatch, {OLD: "this host has no aiter.silu_and_mul_quant"})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("silu_quantize_groups", monkeypatch, {}, torch.float32) == "does not do float32"

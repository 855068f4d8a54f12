"""AITER's call for add_norm_quantize_groups, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import OLD


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "aiter.rmsnorm2d_fwd_with_add_dynamicquant of this host does not take group_size, shuffle_scale"
    check_calls("add_norm_quantize_groups", monkeypatch, {OLD: old})


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("add_norm_quantize_groups", monkeypatch, {}, torch.float32) == "does not do float32"

"""AITER's call for moe_route_grouped, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_route_grouped", monkeypatch)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("moe_route_grouped", monkeypatch, {}, torch.float32) is None
    assert refusal_of("moe_route_grouped", monkeypatch, {"num_expert_groups": 16}) == (
        "16 groups of experts; AITER has kernels for 1, 2, 4 and 8"
    )

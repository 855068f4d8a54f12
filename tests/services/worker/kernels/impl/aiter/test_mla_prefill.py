"""AITER's call for mla_prefill, on both releases and architectures."""

import pytest
import torch

from tests.services.worker.kernels.impl.aiter.calls import check_calls, refusal_of


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("mla_prefill", monkeypatch)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("mla_prefill", monkeypatch, {}, torch.float32) == "does not do float32"
    assert refusal_of("mla_prefill", monkeypatch, {"num_heads": 160}) == ("160 heads, more than 128")
    assert refusal_of("mla_prefill", monkeypatch, {"kv_lora_rank": 256}) == (
        "latents of 512 and 64 numbers, not of 256 and 64"
    )

"""AITER's call for moe_block_scaled, on both releases and architectures."""

from typing import Any

import pytest
import torch

from services.worker.kernels.ops.moe_block_scaled import make_block_moe_case
from tests.services.worker.kernels.impl.aiter.calls import check_calls, host, module_of, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import NEW


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("moe_block_scaled", monkeypatch)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("moe_block_scaled", monkeypatch, {}, torch.float32) == "does not do float32"


def test_numbers_of_tokens_that_fault_are_cut_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with host(monkeypatch, NEW, "gfx942") as patch:
        arguments = [*make_block_moe_case(304, 2, 1, 128, 128).make(torch.bfloat16)]
        module, counts = module_of("moe_block_scaled"), []
        patch.setattr(module, "add_fused", lambda residual, x, *others: counts.append((len(residual), len(x))))
        module.fused(*arguments)
        assert counts == [(152, 152), (152, 152)]
        for count in (336, 303, 1, 0):
            counts.clear()
            module.fused(*(one[:count] if len(one) == 336 else one for one in grown(arguments)))
            assert sum(rows for rows, _ in counts) == count and (len(counts) == 2) == (count == 336)


def grown(arguments: list[Any]) -> list[Any]:
    """As if for 336 tokens; the experts stay."""
    return [one.repeat(2, 1)[:336] if len(one) == 304 else one for one in arguments]

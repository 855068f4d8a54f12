"""How heads and rows are laid out; against the meaning: test_mla_decode.py and test_mla_prefill.py."""

from typing import Any

import pytest
import torch

from services.worker.kernels.impl.triton import _latent_attention as kernels
from services.worker.kernels.ops.mla_decode import make_mla_case, mla_decode


def test_heads_go_in_equal_shares() -> None:
    assert [kernels.share_of(heads) for heads in (6, 8, 16, 64, 128, 96, 80, 67)] == [6, 8, 16, 64, 64, 48, 40, 1]
    assert kernels.share_of(20, 8) == 5


@pytest.mark.parametrize("waves", [0.3, 40.0])
def test_parts_of_a_row_add_up(device: torch.device, monkeypatch: pytest.MonkeyPatch, waves: float) -> None:
    """Few places, and more than there are blocks of keys."""
    monkeypatch.setattr(kernels, "default_shape", lambda *given: kernels.Shape(16, 4, 1, waves))
    arguments: Any = make_mla_case([1, 1, 1], [150, 1, 37], 12, (32, 16)).make(torch.float32)
    wanted = mla_decode.meaning(*arguments)
    q_latent, q_rope, pages, rows, scale = arguments
    moved = [tensor.to(device) for tensor in (rows.query_starts, rows.context_lens, rows.block_tables)]
    names = ("query_starts", "context_lens", "block_tables")
    for name, tensor in zip(names, moved, strict=True):
        object.__setattr__(rows, name, tensor)
    out = torch.full(wanted.shape, torch.nan, device=device)
    kernels.attend_rows(q_latent.to(device), q_rope.to(device), out, pages.to(device), rows, scale)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=1e-5)

"""Rows that lie apart, rows of all widths, and several rows to a program."""

import pytest
import torch

from services.worker.kernels.impl.triton._norm import geometry, launch
from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from services.worker.kernels.ops.rms_norm import rms_norm


def test_heads_within_a_projection_are_read_in_place(device: torch.device) -> None:
    fused = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.linspace(0.5, 1.5, 24, device=device)
    for part in (fused[:, :4], fused[:, 4:], fused[1::2, :, :24], fused.transpose(1, 2)[:, :, :7]):
        norm = weight[: part.shape[-1]]
        got, total = launch(part, None, norm, 1e-5)
        assert got.is_contiguous() and total is None
        torch.testing.assert_close(got, rms_norm.meaning(part, norm, 1e-5), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("rows", "width"), [(3, 5000), (1100, 40)])
def test_all_widths(device: torch.device, rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(1)).to(device)
    weight = torch.linspace(0.5, 1.5, width, device=device)
    got, total = launch(x, residual, weight, 1e-5)
    wanted, wanted_total = add_rms_norm.meaning(x, residual, weight, 1e-5)
    assert total is not None
    torch.testing.assert_close(total, wanted_total, rtol=0.0, atol=0.0)
    torch.testing.assert_close(got, wanted, rtol=4e-6, atol=4e-6)


def test_few_rows_have_a_program_each() -> None:
    assert geometry(1, 128) == (1, 128, 1)
    assert geometry(2, 128) == (16, 128, 4)
    assert geometry(2, 4096) == geometry(1, 4096) == (1, 4096, 8)

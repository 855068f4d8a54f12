"""Rows that lie apart, the gate with a scale per row, ties, zeros, and the sizes of programs."""

import torch

from services.worker.kernels.impl.triton._quantize import geometry, launch, launch_mx, launch_tensor
from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.quantize_tensor import quantize_tensor
from services.worker.kernels.ops.silu_and_mul import silu_and_mul


def same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for left, right in zip(got, wanted, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left.cpu().float(), right.float(), rtol=1e-6, atol=0.0)


def test_rows_may_lie_apart(device: torch.device) -> None:
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    for x in (wide[:, 3:83], wide[::2, :20], wide.t()[:8, :4]):
        same(launch(x.to(device), torch.int8)[:2], quantized(x, torch.int8))


def test_the_gate_with_a_scale_per_row(device: torch.device) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    numbers, scales, _ = launch(x.to(device), torch.int8, gate=True)
    wanted, wanted_scales = quantized(silu_and_mul.meaning(x), torch.int8)
    assert (numbers.cpu().int() - wanted.int()).abs().max() <= 1
    torch.testing.assert_close(scales.cpu(), wanted_scales, rtol=1e-5, atol=0.0)


def test_ties_go_to_even_and_zeros_stay(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.5, 126.5], [0.0] * 6])
    numbers, scales, _ = launch(x.to(device), torch.int8)
    assert numbers.tolist() == [[127, 0, 2, -2, 0, 126], [0] * 6]
    assert scales[0].item() == 1.0 and scales[1].item() > 0.0


def test_one_scale_over_many_programs(device: torch.device) -> None:
    x = torch.randn(3, 2500, generator=torch.Generator().manual_seed(0))
    x[2, 2499] = -9.0
    same(launch_tensor(x.to(device), torch.int8), quantize_tensor.meaning(x, torch.int8))


def test_microscaled_zeros_and_extremes(device: torch.device) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 37, 8)[:, None]
    x[3] = 0.0
    packed, scales = launch_mx(x.to(device), None)
    wanted, wanted_scales = quantize_mxfp4.meaning(x)
    assert torch.equal(packed.cpu(), wanted)
    kept = torch.tensor([row // 16 + row % 16 * 4 for row in range(8)])
    assert torch.equal(scales.flatten().cpu()[kept], wanted_scales.flatten()[kept])


def test_programs_have_whole_rows_only_where_they_must() -> None:
    assert geometry(14336, 0, False) == (16384, 1, 16)
    assert geometry(14336, 128, False) == (128, 16, 4)
    assert geometry(4096, 128, True) == (128, 32, 8)

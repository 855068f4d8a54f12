"""Powers of two as MX stores them, and the places of rows, columns and scales in tiles."""

import pytest
import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton._narrow import column, power, row_start, scale_column, scale_start
from services.worker.kernels.packing.mx import decode_scales, tile_scales
from services.worker.kernels.packing.weight_tiles import tile_weight


@triton.jit
def _powers(scales_ptr, out_ptr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, 256)
    tl.store(out_ptr + place, power(tl.load(scales_ptr + place)))


def test_every_power(device: torch.device) -> None:
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = torch.empty(256, device=device)
    _powers[(1,)](scales.to(device), got)
    assert torch.equal(got.cpu(), decode_scales(scales))


@triton.jit
def _untile(tiles_ptr, scales_ptr, weight_ptr, plain_ptr, K: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    WIDTH: tl.constexpr = K // 2 if FORM == "mxfp4" else K
    cols, groups = tl.arange(0, WIDTH), tl.arange(0, K // 32)
    tl.store(weight_ptr + row * WIDTH + cols, tl.load(tiles_ptr + row_start(row, K, FORM, True) + column(cols, True)))
    first = scales_ptr + scale_start(row, 0, K, FORM, 32, True, True)
    if FORM == "mxfp4":
        tl.store(
            plain_ptr + row * (K // 32) + groups, tl.load(first + scale_column(groups * 32, FORM, 32, True))
        )  # fmt: skip


@pytest.mark.parametrize("form", ["mxfp4", "rows"])
def test_places_in_tiles(device: torch.device, form: str) -> None:
    rows, inner = 48, 1024
    width = inner // 2 if form == "mxfp4" else inner
    weight = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.randint(0, 256, (rows, inner // 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    got, own = torch.zeros_like(weight, device=device), torch.zeros_like(scales, device=device)
    _untile[(rows,)](tile_weight(weight).to(device), tile_scales(scales).to(device), got, own, inner, form)
    assert torch.equal(got.cpu(), weight)
    assert form == "rows" or torch.equal(own.cpu(), scales)

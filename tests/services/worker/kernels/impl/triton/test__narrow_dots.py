"""The pieces of a product of integers: bytes chosen and multiplied, e2m1 as integers, x as fixed point."""

import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _narrow_dots
from services.worker.kernels.packing.mx import decode_mxfp4


@triton.jit
def bytes_kernel(a_ptr, b_ptr, words_ptr, out_ptr, nothing, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, _narrow_dots.dot4(a, b, at))
    tl.store(out_ptr + COUNT + at, _narrow_dots.picked(a, b, 0x6142))
    words = tl.load(words_ptr + at)
    first, second = _narrow_dots._e2m1(words, _narrow_dots.tables(nothing))
    ones = tl.full([COUNT], 0x01010101, tl.int32)
    tl.store(out_ptr + 2 * COUNT + at, _narrow_dots.dot4(first, ones, _narrow_dots.dot4(second, ones, at * 0)))


def test_bytes_are_signed_and_chosen_and_e2m1_are_halves(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, words = torch.randint(-(2**31), 2**31 - 1, (3, 64), generator=generator).to(torch.int32)
    out = torch.zeros(3, 64, dtype=torch.int32, device=device)
    bytes_kernel[(1,)](a.to(device), b.to(device), words.to(device), out, 0, COUNT=64)
    a_bytes, b_bytes = (part.view(torch.int8).view(64, 4).int() for part in (a, b))
    assert torch.equal(out[0].cpu(), (a_bytes * b_bytes).sum(1) + torch.arange(64))
    wanted = torch.stack([a_bytes[:, 2], b_bytes[:, 0], a_bytes[:, 1], b_bytes[:, 2]], 1)
    assert torch.equal(out[1].cpu().view(torch.int8).view(64, 4).int(), wanted)
    numbers = decode_mxfp4(words.view(torch.uint8).view(16, 16), torch.full((16, 1), 127, dtype=torch.uint8))
    twice = (2 * numbers.reshape(64, 8) - _narrow_dots.E2M1_BASE.value).sum(1)
    assert torch.equal(out[2].cpu().float(), twice)


@triton.jit
def fixed_kernel(x_ptr, out_ptr, units_ptr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = _narrow_dots.wide(_narrow_dots.pieces(x_ptr, 0, 64, 64, SPAN))
    _, every, unit = _narrow_dots.fixed(parts, "int4" if SPAN == 32 else "int8")
    at = tl.arange(0, 64 // SPAN)
    tl.store(out_ptr + at, every.to(tl.float32) * unit)
    tl.store(units_ptr + at, unit)


def test_fixed_point_is_off_by_half_of_the_last_of_16_bits_and_nan_stays(device: torch.device) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x[32:48] = 0
    for span in (16, 32):
        out, units = torch.full((2, 64 // span), torch.inf, device=device)
        fixed_kernel[(1,)](x.to(device), out, units, SPAN=span)
        assert torch.all((out.cpu() - x.view(-1, span).sum(1)).abs() <= span / 2 * units.cpu() + 1e-6)
        largest = x.view(-1, span).abs().amax(1)
        torch.testing.assert_close(units.cpu(), largest / _narrow_dots.LARGEST.value, rtol=1e-5, atol=1e-30)
        fixed_kernel[(1,)](x.index_fill(0, torch.tensor([3]), torch.nan).to(device), out, units, SPAN=span)
        assert out.cpu().isnan().tolist() == [True] + [False] * (64 // span - 1)

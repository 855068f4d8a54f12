"""The pieces of a product of e4m3 in halves: x as fp16 by a power of two, and sums that fp16 holds."""

import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _narrow_dots, _narrow_halves

COUNT = 64  # columns
SPAN = 16


@triton.jit
def halves_kernel(x_ptr, words_ptr, scales_ptr, out_ptr, pairs_ptr, units_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = _narrow_dots.wide(_narrow_dots.pieces(x_ptr, 0, COUNT, COUNT, 16))
    halved = _narrow_halves.halved(parts)
    at = tl.arange(0, COUNT // 16)
    tl.store(units_ptr + at, halved[2])
    for i in tl.static_range(2):
        for j in tl.static_range(4):
            tl.store(pairs_ptr + at * 8 + 4 * i + j, halved[i][j])
    words = tl.load(words_ptr + tl.arange(0, COUNT // 4))[None, :]
    scales = tl.load(scales_ptr + at)[None, :]
    sums = _narrow_halves.add(tl.full([1, COUNT // 16], 1.0, tl.float32), words, scales, halved, "blocks")
    tl.store(out_ptr + at, tl.reshape(sums, [COUNT // 16]))


def halves(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sums of units with scales 1, 2 .., x's words as fp16, and what a unit counts."""
    sums, units = torch.full((2, COUNT // SPAN), torch.inf, device=device)
    pairs = torch.zeros(COUNT // 2, dtype=torch.int32, device=device)
    words = weight.to(torch.float8_e4m3fn).view(torch.int32).to(device)
    scales = torch.arange(1.0, COUNT // SPAN + 1, device=device)
    halves_kernel[(1,)](x.to(device), words, scales, sums, pairs, units, COUNT=COUNT)
    return sums.cpu(), pairs.cpu().view(torch.float16).view(-1, SPAN), units.cpu()


def test_bf16_stays_what_it_was_and_products_are_scaled(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(COUNT, generator=generator) * 2.0 ** torch.arange(-8, 8).repeat_interleave(4)).bfloat16()
    weight = (torch.randn(COUNT, generator=generator) * 100).to(torch.float8_e4m3fn).float()
    sums, pairs, units = halves(x, weight, device)
    assert torch.all((pairs.abs().amax(1) >= 8) & (pairs.abs().amax(1) < 16)), "room for eight products of 448"
    torch.testing.assert_close(pairs.float() * units[:, None], x.float().view(-1, SPAN), rtol=0, atol=0)
    products = x.float().view(-1, SPAN) * weight.view(-1, SPAN)
    off = (sums - 1) / torch.arange(1.0, COUNT // SPAN + 1) - products.sum(1)
    assert torch.all(off.abs() <= 2**-11 * products.abs().sum(1))


def test_the_largest_products_are_no_infinity_and_nan_and_infinity_stay(device: torch.device) -> None:
    x = torch.full((COUNT,), 3.9375 * 2.0**100).bfloat16()
    sums, _, _ = halves(x, torch.full((COUNT,), 448.0), device)
    torch.testing.assert_close(
        sums / torch.arange(1.0, 5.0), torch.full((4,), 16 * 448 * 3.9375 * 2.0**100), rtol=2e-3, atol=0
    )
    x = torch.zeros(COUNT).bfloat16()
    x[3], x[20] = torch.nan, torch.inf
    sums, _, _ = halves(x, torch.full((COUNT,), 2.0), device)
    assert not sums[:2].isfinite().any() and sums[2:].tolist() == [1.0, 1.0]

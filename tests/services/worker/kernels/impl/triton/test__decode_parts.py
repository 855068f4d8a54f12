"""A program's walk over its blocks of tokens, all of them or after the first, is attention."""

import pytest
import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton._decode_parts import attend, attend_rest, read_block

PAGE, DIM, VALUE, QUERIES, BLOCK = 16, 32, 16, 16, 32


@triton.jit
def _walk(q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, low, end, DIM: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    heads, dims, values, tokens = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, VALUE), tl.arange(0, BLOCK)
    q = tl.load(q_ptr + heads[:, None] * DIM + dims[None, :])
    peak = tl.full([16], -1.0e30, tl.float32)
    totals = tl.zeros([16, BLOCK], tl.float32)
    acc = tl.zeros([16, VALUE], tl.float32)
    begin = low // BLOCK * BLOCK
    position = tl.maximum(tl.minimum(begin + tokens, end - 1), low)
    pages = tl.load(table_ptr + position // PAGE)
    if APART:
        slots = pages.to(tl.int64) * PAGE + position % PAGE
        k, v = read_block(k_ptr, slots, dims, DIM, DIM, DIM), read_block(v_ptr, slots, values, VALUE, VALUE, VALUE)
        seen = (begin + tokens < end) & (begin + tokens >= low)
        acc, peak, totals = attend(q, k, v, acc, peak, totals, seen, slots, None, None, 0.3, 1, 0.0, False)
        begin += BLOCK
        pages = tl.load(table_ptr + tl.minimum(begin + tokens, end - 1) // PAGE)
    acc, peak, totals = attend_rest(
        q, acc, peak, totals, pages, begin, end, low, low, end - 1, table_ptr, k_ptr, v_ptr, None, None, 0.3,
        1, DIM, VALUE, PAGE, WINDOW, 0.0, False, DIM, VALUE, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + heads[:, None] * VALUE + values[None, :], acc / tl.sum(totals, 1)[:, None])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("apart", [False, True])
def test_the_walk_is_attention(device: torch.device, window: int, apart: bool) -> None:
    generator, length = torch.Generator().manual_seed(0), 90
    q, k, v = (torch.randn(*sizes, generator=generator) for sizes in ((QUERIES, DIM), (128, DIM), (128, VALUE)))
    table = torch.tensor([5, 2, 7, 0, 3, 1], dtype=torch.int32)
    low = max(0, length - window) if window else 0
    out = torch.full((QUERIES, VALUE), torch.nan, device=device)
    arguments = [tensor.to(device) for tensor in (q, k, v, table)]
    _walk[(1,)](*arguments, out, low, length, DIM, VALUE, PAGE, window, BLOCK, apart)
    slots = torch.cat([torch.arange(PAGE) + page * PAGE for page in table.tolist()])[low:length]
    weights = torch.softmax(q @ k[slots].T * 0.3 / 1.4426950408889634, 1)
    torch.testing.assert_close(out.cpu(), weights @ v[slots], rtol=1e-4, atol=1e-4)

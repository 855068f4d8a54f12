"""How a row of few is cut, and what may be read before the kernel ahead has ended."""

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _few_attention, kv_write, rope_kv_write
from services.worker.kernels.impl.triton._decode_attention import Shape, launch
from services.worker.kernels.ops.paged_attention import Extras, make_attention_case, paged_attention


@triton.jit
def _cut_one(out_ptr, length, parts, BLOCK_KV: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    low, begin, blocks, count = _few_attention.cut(length, parts, BLOCK_KV, WINDOW)
    tl.store(out_ptr, low)
    tl.store(out_ptr + 1, begin)
    tl.store(out_ptr + 2, blocks)
    tl.store(out_ptr + 3, count)


@pytest.mark.parametrize(
    ("length", "parts", "window", "wanted"),
    [
        (0, 4, 0, [0, 0, 0, 1]),
        (1, 4, 0, [0, 0, 1, 1]),
        (64, 4, 0, [0, 0, 4, 4]),
        (65, 4, 0, [0, 0, 5, 4]),
        (40, 4, 0, [0, 0, 3, 3]),
        (100, 4, 20, [80, 5, 2, 2]),
    ],
)
def test_a_row_has_a_part_for_each_block_as_far_as_they_go(
    device: torch.device, length: int, parts: int, window: int, wanted: list[int]
) -> None:
    out = torch.zeros(4, dtype=torch.int32, device=device)
    _cut_one[(1,)](out, length, parts, BLOCK_KV=16, WINDOW=window)
    assert out.tolist() == wanted


@pytest.mark.parametrize("block_kv", [16, 64])
@pytest.mark.parametrize("table_rows", [False, True])
@pytest.mark.parametrize("lengths", [[1], [16, 17], [250, 64, 3]])
def test_every_position_of_the_newest_token(
    device: torch.device, block_kv: int, table_rows: bool, lengths: list[int]
) -> None:
    """Alone in its block, at a page's begin and end, and inside one."""
    case = make_attention_case("", [1] * len(lengths), lengths, (4, 2, 48), extras=Extras(table_rows=table_rows))
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)
    rows = type(rows)(
        rows.query_starts.to(device),
        rows.context_lens.to(device),
        rows.block_tables.to(device),
        rows.block_tokens,
        1,
        999,
        num_decode=len(lengths),
        table_rows=None if rows.table_rows is None else rows.table_rows.to(device),
    )
    out = torch.full(q.shape, torch.nan, device=device)
    shape = Shape(block_kv, 4, 1, 1.0, parts=4)
    launch(q.to(device), out, k_cache.to(device), v_cache.to(device), rows, spec, shape)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [rope_kv_write._rope_kv_write, kv_write._kv_write])
def test_the_kernel_ahead_releases_behind_its_own_wait(kernel: Any) -> None:
    """Else few_kernel could read, before its own wait, what a kernel further ahead still writes."""
    source = inspect.getsource(kernel.fn)
    assert 0 < source.index("wait(PDL)") < source.index("release(PDL)")

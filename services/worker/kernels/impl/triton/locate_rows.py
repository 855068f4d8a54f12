"""One program per 128 entries: single integers, moved by what the host did not know."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.locate_rows import locate_rows
from services.worker.kernels.registry import Impl

BLOCK = 128


@triton.jit(do_not_specialize=["count", "num_tokens", "num_rows", "table_width", "line"])
def locate_rows_kernel(  # type: ignore[no-untyped-def]
    lengths_ptr,
    tables_ptr,
    slots_ptr,
    offsets_ptr,
    columns_ptr,
    draw_ptr,
    context_ptr,
    count,
    num_tokens,
    num_rows,
    table_width,
    line,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """columns [line + 1, num_tokens], draw [4, num_rows], context [num_rows]: the first `count` entries."""
    release(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(offsets_ptr + at, at < count, -1)
    live = offset >= 0
    slot = tl.load(slots_ptr + at, live, 0).to(tl.int64)
    position = tl.load(lengths_ptr + slot, live, 1) - 1 + offset
    change = position - tl.load(columns_ptr + num_tokens + at, live, 0)
    place = tl.load(columns_ptr + at, live, 0) + change
    tl.store(columns_ptr + at, place, live)
    tl.store(columns_ptr + num_tokens + at, position, live)
    block = tl.load(tables_ptr + slot * table_width + position // BLOCK_TOKENS, live, 0).to(tl.int64)
    tl.store(columns_ptr + line * num_tokens + at, block * BLOCK_TOKENS + position % BLOCK_TOKENS, live)
    index = tl.load(draw_ptr + 2 * num_rows + at, live, 0) + change
    tl.store(draw_ptr + 2 * num_rows + at, index, live)
    context = tl.load(context_ptr + at, live, 0) + change.to(tl.int32)
    tl.store(context_ptr + at, context, live)


def locate_rows_triton(
    lengths: Tensor,
    tables: Tensor,
    slots: Tensor,
    offsets: Tensor,
    columns: Tensor,
    draw: Tensor,
    context_lens: Tensor,
    block_tokens: int,
    line: int = 2,
) -> None:
    count = slots.shape[0]
    if not count:
        return
    locate_rows_kernel[(triton.cdiv(count, BLOCK),)](
        lengths,
        tables,
        slots,
        offsets,
        columns,
        draw,
        context_lens,
        count,
        columns.shape[1],
        draw.shape[1],
        tables.shape[1],
        line,
        BLOCK_TOKENS=block_tokens,
        BLOCK=BLOCK,
        **options(lengths.device),
    )


IMPL = Impl(locate_rows, "triton", locate_rows_triton, needs_gpu)
AOT = (
    AotCase(
        "locate_rows",
        locate_rows_kernel,
        {
            "lengths_ptr": "*i64:16",
            "tables_ptr": "*i32:16",
            "slots_ptr": "*i32:16",
            "offsets_ptr": "*i32:16",
            "columns_ptr": "*i64:16",
            "draw_ptr": "*i64:16",
            "context_ptr": "*i32:16",
            "count": "i32",
            "num_tokens": "i32",
            "num_rows": "i32",
            "table_width": "i32",
            "line": "i32",
            "BLOCK_TOKENS": 16,
            "BLOCK": BLOCK,
            "PDL": False,
        },
    ),
)

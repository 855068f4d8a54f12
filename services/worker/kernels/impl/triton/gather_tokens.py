"""One program per 256 tokens: a gather and a scatter of single integers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.gather_tokens import gather_tokens
from services.worker.kernels.registry import Impl

BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens", "width"])
def gather_tokens_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tables_ptr,
    places_ptr,
    token_rows_ptr,
    positions_ptr,
    kv_slots_ptr,
    ids_ptr,
    num_tokens,
    width,
    BLOCK_TOKENS: tl.constexpr,
    HAS_TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids[T] = tokens[places]; tables[token_rows, positions // BLOCK_TOKENS] = kv_slots // BLOCK_TOKENS."""
    release(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_tokens
    ids = tl.load(tokens_ptr + tl.load(places_ptr + at, live, 0), live, 0)
    tl.store(ids_ptr + at, ids, live)
    if HAS_TABLES:
        row = tl.load(token_rows_ptr + at, live, 0).to(tl.int64)
        entry = tl.load(positions_ptr + at, live, 0) // BLOCK_TOKENS
        block = tl.load(kv_slots_ptr + at, live, 0) // BLOCK_TOKENS
        tl.store(tables_ptr + row * width + entry, block.to(tl.int32), live)


def gather_tokens_triton(
    tokens: Tensor,
    tables: Tensor | None,
    places: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    block_tokens: int,
) -> Tensor:
    num_tokens = places.shape[0]
    ids = torch.empty(num_tokens, dtype=torch.int32, device=tokens.device)
    if num_tokens:
        gather_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            tokens,
            tokens if tables is None else tables,
            places,
            token_rows,
            positions,
            kv_slots,
            ids,
            num_tokens,
            0 if tables is None else tables.shape[1],
            BLOCK_TOKENS=block_tokens,
            HAS_TABLES=tables is not None,
            BLOCK=BLOCK,
            **options(tokens.device),
        )
    return ids


IMPL = Impl(gather_tokens, "triton", gather_tokens_triton, needs_gpu)
AOT = (
    AotCase(
        "gather_tokens",
        gather_tokens_kernel,
        {
            "tokens_ptr": "*i32:16",
            "tables_ptr": "*i32:16",
            "places_ptr": "*i64:16",
            "token_rows_ptr": "*i32:16",
            "positions_ptr": "*i64:16",
            "kv_slots_ptr": "*i64:16",
            "ids_ptr": "*i32:16",
            "num_tokens": "i32",
            "width": "i32",
            "BLOCK_TOKENS": 16,
            "HAS_TABLES": True,
            "BLOCK": BLOCK,
            "PDL": False,
        },
    ),
)

"""Latent attention on pages, its up-projections absorbed: decode rows in parts, and blocks of tokens of chunks.

A program holds the queries of up to 64 heads (of one token, or of some tokens of a chunk) and reads each latent once:
it is key and value of all of them. Of a decode row each part of the context has a program, dealt on the device as in
_decode_attention.py; where a row has more parts than one, its join_kernel adds them up. Softmax is online, in base 2.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._decode_attention import (
    INTEGERS,
    JOINED,
    LOG2E,
    POINTERS,
    ROW_BUCKETS,
    _deal,
    join_kernel,
    places,
    small_lds,
)
from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait
from services.worker.kernels.impl.triton._prefill_attention import _find_row
from services.worker.kernels.ops.paged_attention import AttentionRows

MOST_HEADS = 64  # of a program
ROWS = 64  # pairs of a head and a token of a program, for chunks
FEW = 64  # tokens of chunks that are read as so many decode rows: blocks of them would leave most processors idle


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc,  # float32 [BLOCK_M, BLOCK_D]
    peak,  # float32 [BLOCK_M], base 2
    total,  # float32 [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    q_rope,  # [BLOCK_M, BLOCK_E]
    position,  # int32 [BLOCK_M]: the last key that is seen
    begin,
    end,  # not read from here on
    table_ptr,  # int32 [M]: the row's pages
    pages_ptr,  # [blocks, PAGE, ROW]
    factor,  # from a product to its logit, base 2
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Adds the keys begin .. end - 1."""
    dims, turned, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_KV)
    last = tl.maximum(end - 1, 0)
    # page numbers are read one turn ahead, so that latents do not wait for them
    pages = tl.load(table_ptr + tl.minimum(begin + tokens, last) // PAGE)
    for start in range(begin, end, BLOCK_KV):
        key = tl.minimum(start + tokens, last)
        place = (pages.to(tl.int64) * PAGE + key % PAGE) * ROW
        pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV + tokens, last) // PAGE)
        latent_at = pages_ptr + place[:, None] + dims[None, :]
        rope_at = pages_ptr + (place + LATENT)[:, None] + turned[None, :]
        if BLOCK_D == LATENT:
            latents = tl.load(latent_at)
        else:
            latents = tl.load(latent_at, mask=(dims < LATENT)[None, :], other=0.0)
        if BLOCK_E == ROPE:
            keys = tl.load(rope_at)
        else:
            keys = tl.load(rope_at, mask=(turned < ROPE)[None, :], other=0.0)
        latents, keys = latents.to(q.dtype), keys.to(q.dtype)  # of 8 bits
        scores = tl.dot(q_rope, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee") * factor
        key = start + tokens
        scores = tl.where((key[None, :] <= position[:, None]) & (key < end)[None, :], scores, -1.0e30)
        higher = tl.maximum(peak, tl.max(scores, 1))
        lowered = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * lowered + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latents, acc * lowered[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


STRIDES = ("q_stride_t", "q_stride_h", "rope_stride_t", "rope_stride_h")


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def latent_decode(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, H, L]
    rope_ptr,  # [T, H, R]
    out_ptr,  # [T, H, L], contiguous
    pages_ptr,  # [blocks, PAGE, ROW], contiguous
    context_ptr,  # int32 [R]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [R] or None
    sums_ptr,  # float32 [places, H, L], and behind them peaks and totals [places, H / JOIN_SHARE, 2, JOIN_SHARE]
    factor,
    num_rows,
    spare,
    least,
    table_stride,
    q_stride_t,
    q_stride_h,
    rope_stride_t,
    rope_stride_h,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # heads of a program
    JOIN_SHARE: tl.constexpr,  # heads of a program of join_kernel
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of SHARE heads, places): programs that share latents run side by side."""
    place = tl.program_id(1)
    in_block, dims, turned = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    own = in_block < SHARE
    head = tl.program_id(0) * SHARE + tl.where(own, in_block, 0)
    release(PDL)
    wait(PDL)
    row, first, count = _deal(context_ptr, place, num_rows, spare, least, BLOCK_KV, 0, BLOCK_R)
    if row >= num_rows:
        return
    length = tl.load(context_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    token = row.to(tl.int64)
    q = tl.load(
        q_ptr + token * q_stride_t + head[:, None] * q_stride_h + dims[None, :],
        mask=(dims < LATENT)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        rope_ptr + token * rope_stride_t + head[:, None] * rope_stride_h + turned[None, :],
        mask=(turned < ROPE)[None, :],
        other=0.0,
    )
    blocks, part = tl.cdiv(length, BLOCK_KV), place - first
    begin = blocks * part // count * BLOCK_KV
    end = tl.minimum(blocks * (part + 1) // count * BLOCK_KV, length)
    acc, peak, total = _attend(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1.0e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        q,
        q_rope,
        tl.zeros([BLOCK_M], tl.int32) + length - 1,
        begin,
        end,
        tables_ptr + table_row.to(tl.int64) * table_stride,
        pages_ptr,
        factor,
        LATENT,
        ROPE,
        ROW,
        PAGE,
        BLOCK_D,
        BLOCK_E,
        BLOCK_KV,
    )
    mask = own[:, None] & (dims < LATENT)[None, :]
    if count == 1:
        # a padded row has no context
        inverse = tl.where(total > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)
        out_at = out_ptr + ((token * NUM_HEADS + head) * LATENT)[:, None] + dims[None, :]
        tl.store(out_at, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        line = place.to(tl.int64) * NUM_HEADS + head
        tl.store(sums_ptr + (line * LATENT)[:, None] + dims[None, :], acc, mask=mask)
        peaks_ptr = sums_ptr + (num_rows + spare).to(tl.int64) * (NUM_HEADS * LATENT)
        peaks_at = peaks_ptr + 2 * (line - head % JOIN_SHARE) + head % JOIN_SHARE
        tl.store(peaks_at, peak, mask=own)
        tl.store(peaks_at + JOIN_SHARE, total, mask=own)


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["starts_ptr", *POINTERS])
def latent_chunks(  # type: ignore[no-untyped-def]
    q_ptr,  # as in latent_decode
    rope_ptr,
    out_ptr,
    pages_ptr,
    starts_ptr,  # int32 [R + 1]
    context_ptr,
    tables_ptr,
    table_rows_ptr,
    factor,
    num_rows,
    table_stride,
    q_stride_t,
    q_stride_h,
    rope_stride_t,
    rope_stride_h,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program; BLOCK_M is at least TOKENS * SHARE
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of SHARE heads, T // TOKENS + R blocks of tokens)."""
    wait(PDL)
    release(PDL)
    # the last blocks have the longest contexts of their rows
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _find_row(starts_ptr, block, 0, 0, num_rows, TOKENS)
    row_start = tl.load(starts_ptr + row)
    row_tokens = tl.load(starts_ptr + row + 1) - row_start
    first = (block - row_start // TOKENS - row) * TOKENS
    if first >= row_tokens:
        return
    context = tl.load(context_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    pair, dims, turned = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    token = first + pair // SHARE
    own = (pair < TOKENS * SHARE) & (token < row_tokens)
    # pairs beyond the end see what the last token sees and are not stored
    token = tl.minimum(token, row_tokens - 1)
    head = tl.program_id(0) * SHARE + pair % SHARE
    position = context - row_tokens + token
    step_token = (row_start + token).to(tl.int64)
    q = tl.load(
        q_ptr + (step_token * q_stride_t + head * q_stride_h)[:, None] + dims[None, :],
        mask=(dims < LATENT)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        rope_ptr + (step_token * rope_stride_t + head * rope_stride_h)[:, None] + turned[None, :],
        mask=(turned < ROPE)[None, :],
        other=0.0,
    )
    acc, _, total = _attend(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1.0e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        q,
        q_rope,
        position,
        0,
        tl.minimum(context - row_tokens + first + TOKENS, context),
        tables_ptr + table_row.to(tl.int64) * table_stride,
        pages_ptr,
        factor,
        LATENT,
        ROPE,
        ROW,
        PAGE,
        BLOCK_D,
        BLOCK_E,
        BLOCK_KV,
    )
    at = out_ptr + ((step_token * NUM_HEADS + head) * LATENT)[:, None] + dims[None, :]
    result = acc * (1.0 / total)[:, None]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=own[:, None] & (dims < LATENT)[None, :])


class Shape(NamedTuple):
    """How programs are laid out; `waves`: places for parts, in programs per processor."""

    block_kv: int
    num_warps: int
    num_stages: int
    waves: float = 2.0


def default_shape(itemsize: int, block_m: int, is_small: bool, narrow: bool = False) -> Shape:
    """A tile of latents is `block_kv` KiB in 16 bits; sums are `block_m` x 512 numbers in registers. narrow: 8 bits.

    The largest that compile without spills for all three targets; not yet tuned on a GPU.
    """
    if itemsize > 2:
        return Shape(16, 8, 1)
    if is_small:
        return Shape(32 if block_m <= 32 else 16, 4, 1)
    return Shape(32, 4 if block_m <= 16 and not narrow else 8, 2)


def share_of(num_heads: int, most: int = MOST_HEADS) -> int:
    """Heads of a program: all, or the largest equal share."""
    blocks = -(-num_heads // most)
    while num_heads % blocks:
        blocks += 1
    return num_heads // blocks


@cache
def _sizes(num_heads: int, latent: int, rope: int, row: int, page: int, tokens: int, block_kv: int) -> dict[str, int]:
    """Constants of both kernels."""
    share = share_of(num_heads)
    return {
        "NUM_HEADS": num_heads,
        "SHARE": share,
        "LATENT": latent,
        "ROPE": rope,
        "ROW": row,
        "PAGE": page,
        "BLOCK_M": block_rows(share, tokens),
        "BLOCK_D": max(16, triton.next_power_of_2(latent)),
        "BLOCK_E": max(16, triton.next_power_of_2(rope)),
        "BLOCK_KV": block_kv,
    }


def block_rows(share: int, tokens: int) -> int:
    return max(16, int(triton.next_power_of_2(share * tokens)))


def bucket_of(num_rows: int) -> int:
    return next((size for size in ROW_BUCKETS if num_rows <= size), int(triton.next_power_of_2(num_rows)))


def _join_sizes(num_heads: int, latent: int, block_kv: int, num_rows: int) -> dict[str, Any]:
    share = share_of(num_heads, 8)
    padded, block_d = int(triton.next_power_of_2(share)), max(16, int(triton.next_power_of_2(latent)))
    return {
        "NUM_KV_HEADS": num_heads // share,
        "SHARE": share,
        "VALUE_DIM": latent,
        "WINDOW": 0,
        "VALUE_SCALE": 1.0,
        "BLOCK_E": block_d,
        "BLOCK_KV": block_kv,
        "BLOCK_R": bucket_of(num_rows),
        "SHARE_PADDED": padded,
        "TOGETHER": max(1, JOINED // (padded * block_d)),
    }


def attend_rows(q: Tensor, q_rope: Tensor, out: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> None:
    """Rows of one token each, row j's the token j. out: [T, H, L], contiguous."""
    num_rows, device = len(rows.context_lens), q.device
    num_heads, latent, rope = q.shape[1], q.shape[2], q_rope.shape[2]
    block_m, narrow = block_rows(share_of(num_heads), 1), pages.element_size() == 1
    shape = default_shape(q.element_size(), block_m, small_lds(device), narrow)
    sizes = _sizes(num_heads, latent, rope, pages.shape[2], rows.block_tokens, 1, shape.block_kv)
    join = _join_sizes(num_heads, latent, shape.block_kv, num_rows)
    blocks = num_heads // sizes["SHARE"]
    spare = places(device, blocks, shape.waves)
    sums = torch.empty((num_rows + spare) * num_heads * (latent + 2), dtype=torch.float32, device=device)
    numbers = num_rows, spare, 1
    latent_decode[(blocks, num_rows + spare)](
        q, q_rope, out, pages, rows.context_lens, rows.block_tables, rows.table_rows, sums, scale * LOG2E,
        *numbers, rows.block_tables.stride(0), *q.stride()[:2], *q_rope.stride()[:2],
        **sizes, JOIN_SHARE=join["SHARE"], BLOCK_R=join["BLOCK_R"],
        num_warps=shape.num_warps, num_stages=shape.num_stages, **options(device),
    )  # fmt: skip
    join_kernel[(join["NUM_KV_HEADS"], num_rows + spare)](
        out, rows.context_lens, None, None, sums, *numbers, **join, num_warps=4, **options(device)
    )


def attend_chunks(q: Tensor, q_rope: Tensor, out: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> None:
    """Rows of any numbers of tokens. out: [T, H, L], contiguous."""
    num_rows, device, num_heads = len(rows.context_lens), q.device, q.shape[1]
    share = share_of(num_heads)
    tokens = max(ROWS // share, 1)
    shape = default_shape(q.element_size(), block_rows(share, tokens), small_lds(device))
    page = rows.block_tokens
    sizes = _sizes(num_heads, q.shape[2], q_rope.shape[2], pages.shape[2], page, tokens, shape.block_kv)
    latent_chunks[(num_heads // share, len(q) // tokens + num_rows)](
        q, q_rope, out, pages, rows.query_starts, rows.context_lens, rows.block_tables, rows.table_rows, scale * LOG2E,
        num_rows, rows.block_tables.stride(0), *q.stride()[:2], *q_rope.stride()[:2],
        **sizes, TOKENS=tokens, num_warps=shape.num_warps, num_stages=shape.num_stages, **options(device),
    )  # fmt: skip


def _aot(name: str, kernel: Any, num_heads: int, is_small: bool, fp8: bool = False) -> AotCase:
    """DeepSeek's latents."""
    share = share_of(num_heads)
    tokens = ROWS // share if kernel is latent_chunks else 1
    block_m = block_rows(share, tokens)
    shape = default_shape(2, block_m, is_small, fp8)
    signature: dict[str, Constant] = dict.fromkeys(("q_ptr", "rope_ptr", "out_ptr", "pages_ptr"), "*bf16:16")
    signature["pages_ptr"] = "*fp8e4nv:16" if fp8 else "*bf16:16"
    signature |= dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(POINTERS, "*i32") | dict.fromkeys(STRIDES, "i32:16")
    signature |= {"starts_ptr": "*i32", "sums_ptr": "*fp32:16", "factor": "fp32", "PDL": False, "TOKENS": tokens}
    signature |= _sizes(num_heads, 512, 64, 576, 16, tokens, shape.block_kv)
    signature |= {"JOIN_SHARE": share_of(num_heads, 8), "BLOCK_R": 256}
    targets = ("gfx942", "gfx950") if is_small else ("sm_90",)
    chosen = {key: signature[key] for key in kernel.arg_names}
    name = f"{name}_{num_heads}{'_fp8' * fp8}_{'amd' if is_small else 'nvidia'}"
    hot = kernel is latent_decode
    return AotCase(name, kernel, chosen, shape.num_warps, shape.num_stages, hot, targets)


def _aot_join() -> AotCase:
    signature: dict[str, Constant] = {**dict.fromkeys(INTEGERS, "i32"), "PDL": False, "context_ptr": "*i32"}
    signature |= {"out_ptr": "*bf16:16", "sinks_ptr": None, "v_scale_ptr": None, "sums_ptr": "*fp32:16"}
    signature |= _join_sizes(128, 512, 64, 256)
    return AotCase("join", join_kernel, {key: signature[key] for key in join_kernel.arg_names})


AOT = (
    *(_aot("decode", latent_decode, heads, is_small) for heads in (8, 16, 32, 64, 128) for is_small in (True, False)),
    *(_aot("chunks", latent_chunks, heads, is_small) for heads in (16, 128) for is_small in (True, False)),
    *(_aot("decode", latent_decode, heads, is_small, True) for heads in (16, 128) for is_small in (True, False)),
    *(_aot("chunks", latent_chunks, 128, is_small, True) for is_small in (True, False)),
    _aot_join(),
)

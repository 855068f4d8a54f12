"""Attention of decode rows, one token each, over their pages. `decode` is the one entry.

A program reads one part of one row's context for one KV head, and all query heads that share it. Parts are dealt on the
device from the rows' true lengths: the grid has a place for each row and `spare` more, and the longest rows are cut so
that these suffice; short rows, and full chips, have one part and no second pass. Of a row in several parts each leaves
float32 sums, and the last to arrive joins them (FUSED), or a second kernel does: so on AMD, whose barrier does not wait
for other waves' stores. Softmax is online, in base 2.
"""

from functools import cache
from math import log2
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._decode_parts import attend, attend_rest, read_block
from services.worker.kernels.impl.triton._launch import (
    AotCase,
    Constant,
    has_dependent_launch,
    options,
    processors,
    release,
    wait,
)
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.tuned import table

LOG2E = 1.4426950408889634
MOST_PARTS = 64  # places beside the rows; joining more takes longer than it saves
JOINED = 8192  # numbers that a program joins at once
EARLY_ROWS = 4  # up to here what precedes the queries is worth hiding: with more rows programs wait in line anyway
ROW_BUCKETS = (16, 64, 256, 512, 1024, 4096)  # compiled for
INTEGERS = ["num_rows", "spare", "least", "table_stride"]  # vary from step to step: never compiled for
POINTERS = ["context_ptr", "tables_ptr", "table_rows_ptr"]


class Shape(NamedTuple):
    """How the work is laid out. `waves`: places for parts, in programs per processor; `least`: blocks of a part, where
    a row has so many; `early`: a part's first block is read before the kernel ahead has ended (see `wait`)."""

    block_kv: int
    num_warps: int
    num_stages: int
    waves: float
    fused: bool = True
    least: int = 1
    early: bool = False


@triton.jit
def _deal(  # type: ignore[no-untyped-def]
    context_ptr, place, num_rows, spare, least, BLOCK_KV: tl.constexpr, WINDOW: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Of this place: its row (num_rows or more: none), the row's first place, and the row's parts."""
    ids = tl.arange(0, BLOCK_R)
    lengths = tl.load(context_ptr + ids, mask=ids < num_rows, other=0, cache_modifier=".cg")
    blocks = tl.cdiv(lengths, BLOCK_KV)
    if WINDOW > 0:
        blocks -= tl.maximum(lengths - WINDOW, 0) // BLOCK_KV
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0), spare), least)
    # together at most num_rows + spare
    parts = tl.where(ids < num_rows, tl.maximum(tl.cdiv(blocks, share), 1), 0)
    ends = tl.cumsum(parts, 0)
    before = ends <= place
    row = tl.sum(before.to(tl.int32), 0)
    return row, tl.sum(tl.where(before, parts, 0), 0), tl.sum(tl.where(ids == row, parts, 0), 0)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    acc, peak, total, out_ptr, sinks_ptr, v_scale_ptr, heads, dims, mask, VALUE_SCALE: tl.constexpr
):
    """Divides and stores. acc: [heads, dims]; peak, total: [heads]; out_ptr at the KV head's first query head."""
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=heads >= 0, other=0.0) * 1.4426950408889634
        higher = tl.maximum(peak, sinks)
        lowered = tl.exp2(peak - higher)
        total = total * lowered + tl.exp2(sinks - higher)
        acc = acc * lowered[:, None]
    # a padded row has no context
    factor = tl.where(total > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)
    if v_scale_ptr is not None:
        factor *= tl.load(v_scale_ptr)
    if VALUE_SCALE != 1.0:
        factor *= VALUE_SCALE
    tl.store(out_ptr + dims[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    sums_ptr,  # float32 [places, NUM_KV_HEADS, SHARE, VALUE_DIM]
    peaks_ptr,  # float32 [places, NUM_KV_HEADS, 2, SHARE], behind the sums: peaks and totals
    out_ptr,  # [T, H, E], at the row's KV head
    sinks_ptr,
    v_scale_ptr,
    first,  # the row's first place
    count,  # of its parts
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOGETHER: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
):
    heads, dims = tl.arange(0, SHARE_PADDED), tl.arange(0, BLOCK_E)
    peak = tl.full([SHARE_PADDED], -1.0e30, tl.float32)
    total = tl.zeros([SHARE_PADDED], tl.float32)
    acc = tl.zeros([SHARE_PADDED, BLOCK_E], tl.float32)
    for start in range(0, count, TOGETHER):
        parts = start + tl.arange(0, TOGETHER)
        at = ((first + parts) * NUM_KV_HEADS + kv_head) * SHARE
        mask = (parts < count)[:, None] & (heads < SHARE)[None, :]
        # other programs wrote them just now: past the first-level cache
        peaks = tl.load(peaks_ptr + 2 * at[:, None] + heads[None, :], mask=mask, other=-1.0e30, cache_modifier=".cg")
        totals = tl.load(
            peaks_ptr + 2 * at[:, None] + SHARE + heads[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        sums = tl.load(
            sums_ptr + ((at[:, None] + heads[None, :]) * VALUE_DIM)[:, :, None] + dims[None, None, :],
            mask=mask[:, :, None] & (dims < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(peak, tl.max(peaks, 0))
        lowered = tl.exp2(peak - higher)
        weights = tl.exp2(peaks - higher[None, :])
        total = total * lowered + tl.sum(totals * weights, 0)
        acc = acc * lowered[:, None] + tl.sum(sums * weights[:, :, None], 0)
        peak = higher
    mask = (heads < SHARE)[:, None] & (dims < VALUE_DIM)[None, :]
    own = tl.where(heads < SHARE, heads, 0)
    sinks_at = sinks_ptr
    if sinks_ptr is not None:
        sinks_at += kv_head * SHARE
    _finish(acc, peak, total, out_ptr + own[:, None] * VALUE_DIM, sinks_at, v_scale_ptr, own, dims, mask, VALUE_SCALE)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, E], contiguous
    k_ptr,  # [blocks, PAGE, NUM_KV_HEADS, HEAD_DIM], contiguous
    v_ptr,  # [blocks, PAGE, NUM_KV_HEADS, VALUE_DIM]
    context_ptr,  # int32 [R]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [R] or None
    sinks_ptr,  # float32 [H] or None
    k_scale_ptr,  # float32 [1] or None; with EACH [blocks, PAGE, NUM_KV_HEADS]
    v_scale_ptr,
    sums_ptr,  # for _join, the peaks behind them
    arrived_ptr,  # int32 [R, NUM_KV_HEADS], zero, and zero again at the end
    factor,  # float32: from a product to its logit in base 2; with SOFTCAP, to twice the argument of tanh
    num_rows,
    spare,
    least,
    table_stride,
    q_stride_t,
    q_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # in base 2
    VALUE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # SHARE, padded for the matrix units
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    FUSED: tl.constexpr,
    EACH: tl.constexpr,
    EARLY: tl.constexpr,  # the first block is read while the kernel ahead still writes the newest token's
    PDL: tl.constexpr,
):
    kv_head, place = tl.program_id(0), tl.program_id(1)
    heads, dims, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KV)
    inside = dims < HEAD_DIM
    values = tl.arange(0, BLOCK_E)
    inside_values = values < VALUE_DIM
    mask = (heads < SHARE)[:, None] & inside_values[None, :]
    own = tl.where(heads < SHARE, heads, 0)
    release(PDL)
    if not EARLY:
        wait(PDL)
    row, first, count = _deal(context_ptr, place, num_rows, spare, least, BLOCK_KV, WINDOW, BLOCK_R)
    if row >= num_rows:
        return
    length = tl.load(context_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr = tables_ptr + table_row.to(tl.int64) * table_stride
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin, blocks = low // BLOCK_KV, tl.cdiv(length, BLOCK_KV)
    blocks -= begin
    part = place - first
    stop = (begin + blocks * (part + 1) // count) * BLOCK_KV
    begin = (begin + blocks * part // count) * BLOCK_KV
    end = tl.minimum(stop, length)

    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * VALUE_DIM
    KEYS: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * VALUE_DIM
    v_scale_once, k_scales_ptr, v_scales_ptr = v_scale_ptr, k_scale_ptr, v_scale_ptr
    if EACH:
        v_scale_once = None
        k_scales_ptr += kv_head
        v_scales_ptr += kv_head
    elif k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr)
    # the first or last token stands in for those outside
    first_seen, last_seen = tl.maximum(low, begin), tl.maximum(end - 1, 0)
    if PAGE % BLOCK_KV == 0:
        pages = tl.load(table_ptr + begin // PAGE)
    else:
        pages = tl.load(table_ptr + tl.maximum(tl.minimum(begin + tokens, last_seen), first_seen) // PAGE)
    if EARLY:
        pages = tl.where(begin < end, pages, 0)  # without a token the table says nothing
        newest = tl.maximum(length - 1, 0)
        newest_page = tl.load(table_ptr + newest // PAGE, mask=begin < end, other=0).to(tl.int64)
        newest_slot = newest_page * PAGE + newest % PAGE
        position = tl.maximum(tl.minimum(begin + tokens, last_seen), first_seen)
        slots = pages.to(tl.int64) * PAGE + position % PAGE
        if PAGE % BLOCK_KV == 0:
            pages = tl.load(table_ptr + tl.minimum(begin + BLOCK_KV, last_seen) // PAGE)
        else:
            pages = tl.load(table_ptr + tl.minimum(begin + BLOCK_KV + tokens, last_seen) // PAGE)
        first_k = read_block(k_ptr, slots, dims, KEYS, HEAD_DIM, BLOCK_D)
        first_v = read_block(v_ptr, slots, values, VALUES, VALUE_DIM, BLOCK_E)
        wait(PDL)
    q_ptr += row.to(tl.int64) * q_stride_t + (kv_head * SHARE + own[:, None]) * q_stride_h
    q = tl.load(q_ptr + dims[None, :], mask=inside[None, :], other=0.0)
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)  # summed up once, at the end
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if EARLY:
        # past the first-level cache, which has them as they were before the wait
        k_new = tl.load(k_ptr + newest_slot * KEYS + dims, mask=inside, other=0.0, cache_modifier=".cg")
        v_new = tl.load(v_ptr + newest_slot * VALUES + values, mask=inside_values, other=0.0, cache_modifier=".cg")
        is_new = (position == newest)[:, None]
        first_k = tl.where(is_new, k_new.to(q.dtype)[None, :], first_k.to(q.dtype))
        first_v = tl.where(is_new, v_new.to(q.dtype)[None, :], first_v.to(q.dtype))
        seen = begin + tokens < end
        if WINDOW > 0:
            seen &= begin + tokens >= low
        acc, peak, totals = attend(
            q, first_k, first_v, acc, peak, totals, seen, slots, k_scales_ptr, v_scales_ptr, factor,
            NUM_KV_HEADS, SOFTCAP, EACH,
        )  # fmt: skip
        if begin >= end:  # a padded row, whose block counted as seen
            totals = tl.zeros_like(totals)
            acc = tl.zeros_like(acc)
        begin += BLOCK_KV
        if begin < end:
            acc, peak, totals = attend_rest(
                q, acc, peak, totals, pages, begin, end, low, first_seen, last_seen, table_ptr, k_ptr, v_ptr,
                k_scales_ptr, v_scales_ptr, factor, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE, WINDOW, SOFTCAP, EACH,
                BLOCK_D, BLOCK_E, BLOCK_KV,
            )  # fmt: skip
    else:
        acc, peak, totals = attend_rest(
            q, acc, peak, totals, pages, begin, end, low, first_seen, last_seen, table_ptr, k_ptr, v_ptr,
            k_scales_ptr, v_scales_ptr, factor, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE, WINDOW, SOFTCAP, EACH,
            BLOCK_D, BLOCK_E, BLOCK_KV,
        )  # fmt: skip
    total = tl.sum(totals, 1)

    out_ptr += (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * SHARE * VALUE_DIM
    peaks_ptr = sums_ptr + (num_rows + spare) * (NUM_KV_HEADS * SHARE * VALUE_DIM)
    if count == 1:
        sinks_at = sinks_ptr
        if sinks_ptr is not None:
            sinks_at += kv_head * SHARE
        own_out = out_ptr + own[:, None] * VALUE_DIM
        _finish(acc, peak, total, own_out, sinks_at, v_scale_once, own, values, mask, VALUE_SCALE)
    else:
        at = (place * NUM_KV_HEADS + kv_head) * SHARE
        tl.store(sums_ptr + (at + own)[:, None] * VALUE_DIM + values[None, :], acc, mask=mask, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + own, peak, mask=heads < SHARE, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + SHARE + own, total, mask=heads < SHARE, cache_modifier=".cg")
        if FUSED:
            # all threads have stored before one of them says so
            tl.debug_barrier()
            arrived_ptr += row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == count - 1:
                _join(
                    sums_ptr, peaks_ptr, out_ptr, sinks_ptr, v_scale_once, first, count, kv_head,
                    NUM_KV_HEADS, SHARE, VALUE_DIM, SHARE_PADDED, BLOCK_E, TOGETHER, VALUE_SCALE,
                )  # fmt: skip
                tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def join_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    context_ptr,
    sinks_ptr,
    v_scale_ptr,
    sums_ptr,
    num_rows,
    spare,
    least,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """As the end of decode_kernel without FUSED; a program a KV head and place, of which those of first parts work."""
    kv_head, place = tl.program_id(0), tl.program_id(1)
    release(PDL)
    wait(PDL)
    row, first, count = _deal(context_ptr, place, num_rows, spare, least, BLOCK_KV, WINDOW, BLOCK_R)
    if (row < num_rows) & (place == first) & (count > 1):
        out_ptr += (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * SHARE * VALUE_DIM
        peaks_ptr = sums_ptr + (num_rows + spare) * (NUM_KV_HEADS * SHARE * VALUE_DIM)
        _join(
            sums_ptr, peaks_ptr, out_ptr, sinks_ptr, v_scale_ptr, first, count, kv_head,
            NUM_KV_HEADS, SHARE, VALUE_DIM, SHARE_PADDED, BLOCK_E, TOGETHER, VALUE_SCALE,
        )  # fmt: skip


class Plan(NamedTuple):
    """What a launch needs beyond its tensors."""

    grid: tuple[int, int]
    spare: int
    least: int
    scratch: tuple[int, int, int]
    factor: float
    decode: dict[str, Any]  # keyword arguments
    join: dict[str, Any] | None  # None: fused


def decode(q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> None:
    """Writes out[:num_decode]. q: [T, H, D]; out: [T, H, E]; caches: [blocks, B, K, D] and [.., E], contiguous."""
    launch(q, out, k_cache, v_cache, rows, spec, None)


def launch(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    spec: AttentionSpec,
    shape: Shape | None,
) -> None:
    """As `decode`; None: the shape that `choose` gives."""
    device, num_rows, tables = q.device, rows.num_decode, rows.block_tables
    heads, numbers = (*q.shape[1:], k_cache.shape[2], v_cache.shape[3]), (*spec[:3], spec.value_scale)
    plan = _plan(device, q.dtype, k_cache.dtype, heads, rows.block_tokens, num_rows, numbers, shape)
    each = spec.kv_scale is not None and spec.kv_scale.each
    sums = torch.empty(plan.scratch, dtype=torch.float32, device=device)
    k_scale, v_scale = spec.kv_scale or (None, None)
    decode_kernel[plan.grid](
        q, out, k_cache, v_cache, rows.context_lens, tables, rows.table_rows, spec.sinks, k_scale, v_scale,
        sums, None if plan.join else _arrivals(device), plan.factor,
        num_rows, plan.spare, plan.least, tables.stride(0), q.stride(0), q.stride(1), EACH=each, **plan.decode,
    )  # fmt: skip
    if plan.join:
        join_kernel[plan.grid](
            out,
            rows.context_lens,
            spec.sinks,
            None if each else v_scale,
            sums,
            num_rows,
            plan.spare,
            plan.least,
            **plan.join,
        )


@cache
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: tuple[int, int, int, int],  # of queries: their number and size; number of KV heads, size of a value
    page: int,
    num_rows: int,
    numbers: tuple[float, int, float, float],  # of the spec: scale, window, softcap, of values
    shape: Shape | None,
) -> Plan:
    (num_heads, head_dim, num_kv_heads, value_dim), (scale, window, softcap, value_scale) = heads, numbers
    if shape is None:
        shape = choose(device, dtype, kv_dtype, num_rows, num_heads // num_kv_heads, num_kv_heads, head_dim)
    spare = places(device, num_kv_heads, shape.waves)
    common = _sizes(num_heads, num_kv_heads, value_dim, shape.block_kv, num_rows)
    common |= {"WINDOW": window, "VALUE_SCALE": value_scale, **options(device)}
    return Plan(
        grid=(num_kv_heads, num_rows + spare),
        spare=spare,
        least=shape.least,
        scratch=(num_rows + spare, num_heads, value_dim + 2),
        factor=2 * LOG2E * scale / softcap if softcap else scale * LOG2E,
        decode={
            **common,
            **_key_sizes(head_dim),
            "PAGE": page,
            "SOFTCAP": softcap * LOG2E,
            "BLOCK_M": _padded_share(num_heads, num_kv_heads),
            "FUSED": shape.fused,
            "EARLY": shape.early,
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
        },
        join=None if shape.fused else {**common, "num_warps": 4},
    )


def _key_sizes(head_dim: int) -> dict[str, int]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}


def _sizes(num_heads: int, num_kv_heads: int, value_dim: int, block_kv: int, num_rows: int) -> dict[str, Any]:
    """Constants of both kernels."""
    share = num_heads // num_kv_heads
    share_padded, block_e = triton.next_power_of_2(share), max(16, triton.next_power_of_2(value_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "SHARE": share,
        "VALUE_DIM": value_dim,
        "BLOCK_E": block_e,
        "BLOCK_KV": block_kv,
        "BLOCK_R": next((b for b in ROW_BUCKETS if num_rows <= b), triton.next_power_of_2(num_rows)),
        "SHARE_PADDED": share_padded,
        "TOGETHER": max(1, JOINED // (share_padded * block_e)),
    }


def _padded_share(num_heads: int, num_kv_heads: int) -> int:
    return max(16, int(triton.next_power_of_2(num_heads // num_kv_heads)))


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of one launch after the other, which leave them at zero. Made in the first step, before any capture."""
    return torch.zeros(1 << 18, dtype=torch.int32, device=device)


def places(device: torch.device, num_kv_heads: int, waves: float) -> int:
    """How many parts there may be more than rows."""
    return max(1, min(MOST_PARTS, round(waves * processors(device, interpreted=4) / num_kv_heads)))


def choose(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_rows: int,
    share: int,
    num_kv_heads: int,
    head_dim: int,
) -> Shape:
    """From the nearest row of this GPU's table for the head size and the cache's width, else a sane one."""
    shape = default_shape(dtype.itemsize, kv_dtype.itemsize, head_dim, small_lds(device))
    if dtype.itemsize != 2:
        return shape
    fitting = [
        entry
        for entry in table("paged_attention", device)
        if entry["head_dim"] == head_dim and entry["kv_bytes"] == kv_dtype.itemsize
    ]
    if not fitting:
        return shape

    def distance(entry: Any) -> float:
        """KV heads and query heads per KV head tell kernels apart; rows choose among one's entries."""
        heads = abs(log2(entry["kv_heads"] / num_kv_heads)) + abs(log2(entry["share"] / share))
        return 100 * heads + abs(log2(entry["rows"] / max(num_rows, 1)))

    best = min(fitting, key=distance)
    early = num_rows <= EARLY_ROWS and has_dependent_launch(device)
    return Shape(**{"early": early, **{name: best[name] for name in Shape._fields if name in best}})


def small_lds(device: torch.device) -> bool:
    """At most 64 KiB of shared memory per block (gfx942), or no knowledge of it."""
    return device.type != "cuda" or torch.version.hip is not None


def default_shape(itemsize: int, kv_itemsize: int, head_dim: int, is_small: bool) -> Shape:
    width = triton.next_power_of_2(head_dim) * kv_itemsize
    if itemsize > 2:
        return Shape(32, 4, 1, 2.0)
    if is_small:
        return Shape(64 if width <= 256 else 32, 4, 2, 2.0, fused=False)
    # what most rows of an H200's table say; without spills, as larger blocks are not
    return Shape(32, 2, 4, 2.0) if width <= 256 else Shape(32, 4, 3, 2.0)


def _aot(
    name: str,
    heads: tuple[int, int, int],
    shape: Shape,
    extras: bool = False,
    num_rows: int = 16,
    value_dim: int = 0,
    each: bool = False,
) -> AotCase:
    """`extras`: everything optional at once, with 8-bit keys and values; `each`: these with scales of their own."""
    kv, scale = ("*fp8e4nv:16", "*fp32") if extras or each else ("*bf16:16", None)
    sizes = _sizes(*heads[:2], value_dim or heads[2], shape.block_kv, num_rows) | _key_sizes(heads[2])
    sizes["VALUE_SCALE"] = 0.707 if value_dim else 1.0
    signature: dict[str, Constant] = dict.fromkeys(INTEGERS, "i32")
    signature |= dict.fromkeys(POINTERS, "*i32")
    signature |= dict.fromkeys(("q_stride_t", "q_stride_h"), "i32:16")
    signature |= {"q_ptr": "*bf16:16", "out_ptr": "*bf16:16", "k_ptr": kv, "v_ptr": kv}
    signature |= {"sinks_ptr": "*fp32" if extras else None, "k_scale_ptr": scale, "v_scale_ptr": scale}
    signature |= {"sums_ptr": "*fp32:16", "arrived_ptr": "*i32:16", "factor": "fp32"}
    signature |= {
        "table_rows_ptr": "*i32" if extras else None,
        "PAGE": 16,
        "PDL": False,
        "FUSED": shape.fused,
        "EACH": each,
        "EARLY": shape.early,
    }
    signature |= {"WINDOW": 1024 if extras else 0, "SOFTCAP": 50.0 if extras else 0.0}
    signature |= {"BLOCK_M": _padded_share(*heads[:2]), **sizes}
    if name.startswith("join"):
        return AotCase(name, join_kernel, {key: signature[key] for key in join_kernel.arg_names})
    return AotCase(
        name, decode_kernel, signature, shape.num_warps, shape.num_stages, targets=("sm_90",) if shape.early else ()
    )


_NVIDIA, _AMD = default_shape(2, 2, 128, False), default_shape(2, 2, 128, True)
AOT = (
    _aot("16x8x128", (16, 8, 128), _NVIDIA),
    _aot("16x8x128_amd", (16, 8, 128), _AMD),
    _aot("16x8x128_early", (16, 8, 128), _NVIDIA._replace(early=True), num_rows=1),
    _aot("32x8x128_early_extras", (32, 8, 128), _NVIDIA._replace(early=True), extras=True, num_rows=1),
    _aot("16x8x128_256rows", (16, 8, 128), _NVIDIA, num_rows=256),
    _aot("32x8x128", (32, 8, 128), _NVIDIA),
    _aot("32x4x128", (32, 4, 128), _NVIDIA),
    _aot("32x4x128_amd", (32, 4, 128), _AMD),
    _aot("join", (32, 8, 128), _AMD),
    _aot("12x3x64_amd", (12, 3, 64), default_shape(2, 2, 64, True)),
    _aot("32x8x96_amd", (32, 8, 96), default_shape(2, 2, 96, True)),
    _aot("16x8x192_amd", (16, 8, 192), default_shape(2, 2, 192, True)),
    _aot("16x8x256_amd", (16, 8, 256), default_shape(2, 2, 256, True)),
    _aot("64x4x192_values128_amd", (64, 4, 192), default_shape(2, 2, 192, True), value_dim=128),
    _aot("32x8x128_extras_amd", (32, 8, 128), default_shape(2, 1, 128, True), extras=True),
    _aot("32x8x128_each_amd", (32, 8, 128), default_shape(2, 1, 128, True), each=True),
)

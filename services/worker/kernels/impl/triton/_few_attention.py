"""Attention of few decode rows; and what the kernels for few and for many share: how the parts of a row are joined.

Few rows do not fill a GPU and take as long as their longest chain of loads. So nothing is dealt among rows: each is cut
by its own length alone; and all but the newest token is read while the kernel ahead still runs.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._launch import release, wait

POINTERS = ["context_ptr", "tables_ptr", "table_rows_ptr"]


@triton.jit
def cut(length, parts, BLOCK_KV: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a row of few: its first token, its first block, its blocks, and how many of its parts are not empty."""
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    blocks = tl.cdiv(length, BLOCK_KV) - low // BLOCK_KV
    return low, low // BLOCK_KV, blocks, tl.maximum(tl.minimum(blocks, parts), 1)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    acc, peak, total, out_ptr, sinks_ptr, v_scale_ptr, heads, dims, mask
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
    tl.store(out_ptr + dims[None, :], (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def join(  # type: ignore[no-untyped-def]
    sums_ptr,  # float32 [places, NUM_KV_HEADS, SHARE, HEAD_DIM]
    peaks_ptr,  # float32 [places, NUM_KV_HEADS, 2, SHARE], behind the sums: peaks and totals
    out_ptr,  # [T, H, D], at the row's KV head
    sinks_ptr,
    v_scale_ptr,
    first,  # the row's first place
    count,  # of its parts
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    heads, dims = tl.arange(0, SHARE_PADDED), tl.arange(0, BLOCK_D)
    peak = tl.full([SHARE_PADDED], -1.0e30, tl.float32)
    total = tl.zeros([SHARE_PADDED], tl.float32)
    acc = tl.zeros([SHARE_PADDED, BLOCK_D], tl.float32)
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
            sums_ptr + ((at[:, None] + heads[None, :]) * HEAD_DIM)[:, :, None] + dims[None, None, :],
            mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(peak, tl.max(peaks, 0))
        lowered = tl.exp2(peak - higher)
        weights = tl.exp2(peaks - higher[None, :])
        total = total * lowered + tl.sum(totals * weights, 0)
        acc = acc * lowered[:, None] + tl.sum(sums * weights[:, :, None], 0)
        peak = higher
    mask = (heads < SHARE)[:, None] & (dims < HEAD_DIM)[None, :]
    own = tl.where(heads < SHARE, heads, 0)
    sinks_at = sinks_ptr
    if sinks_ptr is not None:
        sinks_at += kv_head * SHARE
    finish(acc, peak, total, out_ptr + own[:, None] * HEAD_DIM, sinks_at, v_scale_ptr, own, dims, mask)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if SOFTCAP > 0:
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def _turn(q, k, v, seen, peak, totals, acc, factor, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of few_kernel: as in decode_kernel's loop."""
    scores = _capped(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * factor, SOFTCAP)
    scores = tl.where(seen[None, :], scores, -1.0e30)
    higher = tl.maximum(peak, tl.max(scores, 1))
    lowered = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    totals = totals * lowered[:, None] + weights
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * lowered[:, None], input_precision="ieee")
    return higher, totals, acc


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=POINTERS)
def few_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    context_ptr,
    tables_ptr,
    table_rows_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sums_ptr,
    arrived_ptr,
    factor,
    table_stride,
    q_stride_t,
    q_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    """As decode_kernel, its parameters too, for few rows. A program a KV head, part and row, so nothing is dealt.

    What is read before `wait` was written at least two launches ahead: lengths, tables and all tokens but the newest.
    They are there because the kernel directly ahead (rope_kv_write) releases only behind its own wait.
    """
    kv_head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows, parts = tl.num_programs(2), tl.num_programs(1)
    heads, dims, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KV)
    inside = dims < HEAD_DIM
    mask = (heads < SHARE)[:, None] & inside[None, :]
    own = tl.where(heads < SHARE, heads, 0)
    release(PDL)
    length = tl.load(context_ptr + row, cache_modifier=".cg")
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row, cache_modifier=".cg")
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr)
    low, begin, blocks, count = cut(length, parts, BLOCK_KV, WINDOW)
    # a row's first part always waits, so this kernel cannot end before the one ahead
    if part >= count:
        return
    stop = (begin + blocks * (part + 1) // count) * BLOCK_KV
    begin = (begin + blocks * part // count) * BLOCK_KV
    newest = tl.maximum(length - 1, 0)
    # only the last part has the newest token; a padded row has none
    has_newest = (stop >= length) & (length > 0)
    end = tl.minimum(stop, newest)
    first_seen, last_seen = tl.maximum(low, begin), tl.maximum(end - 1, begin)
    table_ptr = tables_ptr + table_row.to(tl.int64) * table_stride
    position = tl.maximum(tl.minimum(begin + tokens, last_seen), first_seen)
    ahead = begin + BLOCK_KV
    newest_page = tl.load(table_ptr + newest // PAGE, cache_modifier=".cg")
    if PAGE % BLOCK_KV == 0:
        first_page = tl.load(table_ptr + begin // PAGE, cache_modifier=".cg")
        pages = tl.load(table_ptr + tl.minimum(ahead, last_seen) // PAGE, cache_modifier=".cg")
    else:
        first_page = tl.load(table_ptr + position // PAGE, cache_modifier=".cg")
        pages = tl.load(table_ptr + tl.minimum(ahead + tokens, last_seen) // PAGE, cache_modifier=".cg")
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    slots = first_page.to(tl.int64) * PAGE + position % PAGE
    offsets = (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
    seen = begin + tokens < end
    if WINDOW > 0:
        seen &= begin + tokens >= low
    k = tl.load(k_ptr + offsets, mask=seen[:, None] & inside[None, :], other=0.0, cache_modifier=".cg")
    v = tl.load(v_ptr + offsets, mask=seen[:, None] & inside[None, :], other=0.0, cache_modifier=".cg")
    wait(PDL)
    q_ptr += row.to(tl.int64) * q_stride_t + (kv_head * SHARE + own[:, None]) * q_stride_h
    q = tl.load(q_ptr + dims[None, :], mask=inside[None, :], other=0.0)
    newest_at = (newest_page.to(tl.int64) * PAGE + newest % PAGE) * (NUM_KV_HEADS * HEAD_DIM) + dims
    k_newest = tl.load(k_ptr + newest_at, mask=inside & has_newest, other=0.0)
    v_newest = tl.load(v_ptr + newest_at, mask=inside & has_newest, other=0.0)
    # the sums begin with the newest token, whose weight is 1
    score = tl.sum(q.to(tl.float32) * k_newest.to(tl.float32)[None, :], 1)
    peak = tl.where(has_newest, _capped(score * factor, SOFTCAP), -1.0e30)
    totals = tl.where(((heads >= 0)[:, None] & (tokens == 0)[None, :]) & has_newest, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + v_newest.to(tl.float32)[None, :]
    peak, totals, acc = _turn(q, k, v, seen, peak, totals, acc, factor, SOFTCAP)
    for start in range(ahead, end, BLOCK_KV):
        position = tl.minimum(start + tokens, last_seen)
        slots = pages.to(tl.int64) * PAGE + position % PAGE
        offsets = (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
        if PAGE % BLOCK_KV == 0:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV, last_seen) // PAGE)
        else:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV + tokens, last_seen) // PAGE)
        if BLOCK_D == HEAD_DIM:
            k, v = tl.load(k_ptr + offsets), tl.load(v_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[None, :], other=0.0)
        seen = start + tokens < end
        if WINDOW > 0:
            seen &= start + tokens >= low
        peak, totals, acc = _turn(q, k, v, seen, peak, totals, acc, factor, SOFTCAP)
    total = tl.sum(totals, 1)

    out_ptr += (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * SHARE * HEAD_DIM
    if count == 1:
        sinks_at = sinks_ptr
        if sinks_ptr is not None:
            sinks_at += kv_head * SHARE
        finish(acc, peak, total, out_ptr + own[:, None] * HEAD_DIM, sinks_at, v_scale_ptr, own, dims, mask)
    else:
        peaks_ptr = sums_ptr + num_rows * parts * (NUM_KV_HEADS * SHARE * HEAD_DIM)
        at = ((row * parts + part) * NUM_KV_HEADS + kv_head) * SHARE
        tl.store(sums_ptr + (at + own)[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + own, peak, mask=heads < SHARE, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + SHARE + own, total, mask=heads < SHARE, cache_modifier=".cg")
        if FUSED:
            tl.debug_barrier()
            arrived_ptr += row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == count - 1:
                join(
                    sums_ptr, peaks_ptr, out_ptr, sinks_ptr, v_scale_ptr, row * parts, count, kv_head,
                    NUM_KV_HEADS, SHARE, HEAD_DIM, SHARE_PADDED, BLOCK_D, TOGETHER,
                )  # fmt: skip
                tl.store(arrived_ptr, 0)

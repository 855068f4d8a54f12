"""Parts of `_decode_attention`: the walk of a program over its blocks of tokens."""

import triton
import triton.language as tl


@triton.jit
def read_block(  # type: ignore[no-untyped-def]
    base_ptr, slots, dims, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """[slots, BLOCK] of a cache, from its KV head on."""
    offsets = (slots * STRIDE)[:, None] + dims[None, :]
    if BLOCK == DIM:
        return tl.load(base_ptr + offsets)
    else:
        return tl.load(base_ptr + offsets, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q, k, v, acc, peak, totals, seen, slots, k_scales_ptr, v_scales_ptr, factor,
    SCALES: tl.constexpr, SOFTCAP: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One block of tokens more. seen: [BLOCK_KV]; k_scales_ptr, v_scales_ptr: with EACH, at the KV head."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * factor
    if EACH:
        scores *= tl.load(k_scales_ptr + slots * SCALES)[None, :]
    if SOFTCAP > 0:
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)
    scores = tl.where(seen[None, :], scores, -1.0e30)
    higher = tl.maximum(peak, tl.max(scores, 1))
    lowered = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    totals = totals * lowered[:, None] + weights
    if EACH:
        weights *= tl.load(v_scales_ptr + slots * SCALES)[None, :]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * lowered[:, None], input_precision="ieee")
    return acc, higher, totals


@triton.jit
def attend_rest(  # type: ignore[no-untyped-def]
    q, acc, peak, totals,
    pages,  # of the block at `begin`
    begin, end, low, first_seen, last_seen,  # tokens
    table_ptr, k_ptr, v_ptr,  # of the row; at the KV head
    k_scales_ptr, v_scales_ptr, factor,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EACH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The tokens begin .. end - 1. Page numbers are read one turn ahead, so that keys do not wait for them."""
    dims, values, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_KV)
    for start in range(begin, end, BLOCK_KV):
        position = tl.minimum(start + tokens, last_seen)
        if WINDOW > 0:
            position = tl.maximum(position, first_seen)
        slots = pages.to(tl.int64) * PAGE + position % PAGE
        if PAGE % BLOCK_KV == 0:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV, last_seen) // PAGE)
        else:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV + tokens, last_seen) // PAGE)
        k = read_block(k_ptr, slots, dims, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D)
        v = read_block(v_ptr, slots, values, NUM_KV_HEADS * VALUE_DIM, VALUE_DIM, BLOCK_E)
        seen = start + tokens < end
        if WINDOW > 0:
            seen &= start + tokens >= low
        acc, peak, totals = attend(
            q, k, v, acc, peak, totals, seen, slots, k_scales_ptr, v_scales_ptr, factor, NUM_KV_HEADS, SOFTCAP, EACH
        )
    return acc, peak, totals

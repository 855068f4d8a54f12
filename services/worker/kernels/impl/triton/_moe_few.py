"""Experts for a few tokens: no sorting, each (token, expert) pair multiplies for itself, weights go to registers.

Two launches. The first gives a program BLOCK_I gated columns of one pair; the second gives it BLOCK_N columns
of one token, which loops over the token's experts, so that the weighted sum and the residual add are its epilogue.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import expert_gate
from services.worker.kernels.impl.triton._launch import release, wait

FIRST = tl.constexpr("evict_first")  # weights: read once, the L1 cache is for what rows of them share
LAST = tl.constexpr("evict_last")


@triton.jit
def gate_pairs(  # type: ignore[no-untyped-def]
    x_ptr,
    experts_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [T, N]; experts int32 [T, K]; weight [E, 2I, N]; bias [E, 2I] or None; out [T * K, I].

    Grid (T * K, I / BLOCK_I).

    Pairs are the fast axis: those of one expert read the same weights at about the same time, from the L2 cache.
    """
    pair = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    column = tl.arange(0, CHUNK)
    row_in = tl.minimum(row, INNER - 1)  # a row too many repeats the last one and is not stored
    wait(PDL)
    # behind the wait: that the next kernel may then read `experts` without waiting is part of the bargain
    release(PDL)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    gate_ptrs = weight_ptr + expert * (2 * INNER * HIDDEN) + row_in[:, None] * HIDDEN + column[None, :]
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * HIDDEN + column
    gate = tl.zeros([BLOCK_I, CHUNK], tl.float32)
    up = tl.zeros([BLOCK_I, CHUNK], tl.float32)
    for begin in tl.static_range(0, HIDDEN, CHUNK):
        if begin + CHUNK <= HIDDEN:
            g = tl.load(gate_ptrs + begin, eviction_policy="evict_first")
            u = tl.load(gate_ptrs + (begin + INNER * HIDDEN), eviction_policy="evict_first")
            x = tl.load(x_ptrs + begin)
        else:
            inside = begin + column < HIDDEN
            g = tl.load(gate_ptrs + begin, mask=inside[None, :], other=0.0)
            u = tl.load(gate_ptrs + (begin + INNER * HIDDEN), mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + begin, mask=inside, other=0.0)
        wide = x.to(tl.float32)[None, :]
        gate += g.to(tl.float32) * wide
        up += u.to(tl.float32) * wide
    g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * INNER) + row_in
        g += tl.load(bias_ptrs).to(tl.float32)
        u += tl.load(bias_ptrs + INNER).to(tl.float32)
    gated = expert_gate(g, u, CLAMPED)
    tl.store(out_ptr + pair.to(tl.int64) * INNER + row, gated.to(out_ptr.dtype.element_ty), mask=row < INNER)


@triton.jit
def _load_tile(ptrs, offset, inside, MASKED: tl.constexpr, POLICY: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        return tl.load(ptrs + offset, mask=inside, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + offset, eviction_policy=POLICY)


@triton.jit
def _weight_tile(  # type: ignore[no-untyped-def]
    weight_ptr, experts_ptr, row, step,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step `step` of a token's walk: [EXPERTS, BLOCK_N, CHUNK] of its experts' rows. experts_ptr: the token's."""
    CHUNKS: tl.constexpr = (INNER + CHUNK - 1) // CHUNK
    k = step // CHUNKS * EXPERTS + tl.arange(0, EXPERTS)
    column = step % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    # `gate_pairs` lets this kernel start only after its own wait, so whatever came before it is visible here already;
    # .cg: not from a stale line of the L1 cache. So the weights are on their way while `gate_pairs` still runs.
    expert = tl.load(experts_ptr + tl.minimum(k, TOP_K - 1), cache_modifier=".cg").to(tl.int64)
    starts = weight_ptr + expert[:, None, None] * (HIDDEN * INNER) + row[None, :, None] * INNER
    inside = (k < TOP_K)[:, None, None] & (column < INNER)[None, None, :]
    return _load_tile(starts, column[None, None, :], inside, TOP_K % EXPERTS != 0 or INNER % CHUNK != 0, FIRST)


@triton.jit
def _weighted(  # type: ignore[no-untyped-def]
    w, hidden_ptr, weights_ptr, step,
    TOP_K: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The products of step `step` with its tile w, summed over experts, [BLOCK_N, CHUNK]. Pointers: the token's."""
    CHUNKS: tl.constexpr = (INNER + CHUNK - 1) // CHUNK
    k = step // CHUNKS * EXPERTS + tl.arange(0, EXPERTS)
    column = step % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    k_in = tl.minimum(k, TOP_K - 1)
    # as large as the weights' tile, so that it comes in their layout, without a way through shared memory
    ptrs = tl.broadcast_to(hidden_ptr + k_in[:, None, None] * INNER + column[None, None, :], w.shape)
    inside = (k < TOP_K)[:, None, None] & (column < INNER)[None, None, :]
    h = _load_tile(ptrs, 0, inside, TOP_K % EXPERTS != 0 or INNER % CHUNK != 0, LAST)
    scale = tl.load(weights_ptr + k_in, mask=k < TOP_K, other=0.0)[:, None, None]
    # the experts lie within a thread: their sum crosses none
    return tl.sum(w.to(tl.float32) * (h.to(tl.float32) * scale), axis=0)


@triton.jit
def down_tokens(  # type: ignore[no-untyped-def]
    hidden_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [T * K, I]; weights float32 [T, K]; experts int32 [T, K]; weight [E, N, I]; bias [E, N] or None;
    residual [T, N], in place.

    Grid (T, N / BLOCK_N). A step takes CHUNK columns of EXPERTS experts of the token: the more experts the fewer
    sums across threads, the more columns the longer the stretches of memory that are read at once.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in = tl.minimum(row, HIDDEN - 1)
    experts_ptr += token * TOP_K
    weights_ptr += token * TOP_K
    hidden_ptr += token * TOP_K * INNER
    STEPS: tl.constexpr = (TOP_K + EXPERTS - 1) // EXPERTS * ((INNER + CHUNK - 1) // CHUNK)
    w = _weight_tile(weight_ptr, experts_ptr, row_in, 0, TOP_K, HIDDEN, INNER, EXPERTS, CHUNK)
    wait(PDL)
    release(PDL)
    total = tl.zeros([BLOCK_N, CHUNK], tl.float32)
    for step in tl.range(1, STEPS, num_stages=1):
        following = _weight_tile(weight_ptr, experts_ptr, row_in, step, TOP_K, HIDDEN, INNER, EXPERTS, CHUNK)
        total += _weighted(w, hidden_ptr, weights_ptr, step - 1, TOP_K, INNER, EXPERTS, CHUNK)
        w = following
    total += _weighted(w, hidden_ptr, weights_ptr, STEPS - 1, TOP_K, INNER, EXPERTS, CHUNK)
    sums = tl.sum(total, axis=1)
    if bias_ptr is not None:
        k = tl.arange(0, TOP_K_PAD)
        k_in = tl.minimum(k, TOP_K - 1)
        expert = tl.load(experts_ptr + k_in).to(tl.int64)
        bias = tl.load(bias_ptr + expert[:, None] * HIDDEN + row_in[None, :]).to(tl.float32)
        share = tl.load(weights_ptr + k_in, mask=k < TOP_K, other=0.0)
        sums += tl.sum(bias * share[:, None], axis=0)
    out_ptrs = residual_ptr + token * HIDDEN + row
    inside = row < HIDDEN
    before = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (before + sums).to(residual_ptr.dtype.element_ty), mask=inside)

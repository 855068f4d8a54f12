"""Experts for many tokens: pairs sorted by expert on the device, then products in tiles of one expert each.

Four launches: `sort_pairs`, `gate_blocks`, `down_blocks`, `combine_pairs`. A pair p = t * K + k is token t's k-th
expert. The sort fills `plan`, int32: [0] the number of row blocks; [16 + b] the expert of block b; from `ids_start` on,
BLOCK_M pairs per block, with the number of all pairs where there is none. Weights are the left operand of a product:
its 64 and more rows fill the matrix unit however few tokens an expert has. No atomics, so results do not vary.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import expert_gate
from services.worker.kernels.impl.triton._launch import release, wait

TABLE_START = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def sort_pairs(  # type: ignore[no-untyped-def]
    experts_ptr,
    plan_ptr,
    num_pairs,
    ids_start,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """experts int32 [T * K]; plan int32. Grid (E): a program counts all pairs and places those of its own expert."""
    mine = tl.program_id(0)
    wait(PDL)
    release(PDL)
    bins = tl.arange(0, EXPERTS_PAD)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0), EXPERTS_PAD)
    counts -= tl.where(bins == 0, tl.cdiv(num_pairs, CHUNK) * CHUNK - num_pairs, 0)  # those beyond the last pair
    blocks = tl.cdiv(counts, BLOCK_M)
    first = tl.sum(tl.where(bins < mine, blocks, 0), axis=0)
    num_mine = tl.sum(tl.where(bins == mine, blocks, 0), axis=0)
    if mine == 0:
        tl.store(plan_ptr, tl.sum(blocks, axis=0))
    for begin in range(0, num_mine, 32):
        block = begin + tl.arange(0, 32)
        tl.store(plan_ptr + TABLE_START + first + block, mine, mask=block < num_mine)
    ids_ptr = plan_ptr + ids_start + first * BLOCK_M
    placed = 0
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        hit = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == mine
        order = tl.cumsum(hit.to(tl.int32), axis=0)
        tl.store(ids_ptr + placed + order - 1, pair, mask=hit)
        placed += tl.sum(hit.to(tl.int32), axis=0)
    rest = placed + tl.arange(0, BLOCK_M)
    tl.store(ids_ptr + rest, num_pairs, mask=rest < num_mine * BLOCK_M)


@triton.jit
def _tile(program, num_blocks, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's row block and column block; GROUP_M row blocks go through all columns together."""
    group = program // (GROUP_M * COLUMNS)
    first = group * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    within = program % (GROUP_M * COLUMNS)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def gate_blocks(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs,
    ids_start,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [T, N]; weight [E, 2I, N], gate rows first; bias [E, 2I] or None; out [T * K, I], the gated of every pair."""
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    COLUMNS: tl.constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    if program < num_blocks * COLUMNS:
        block, column = _tile(program, num_blocks, COLUMNS, GROUP_M)
        expert = tl.load(plan_ptr + TABLE_START + block).to(tl.int64)
        pair = tl.load(plan_ptr + ids_start + block * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < num_pairs
        row = column * BLOCK_I + tl.arange(0, BLOCK_I)
        row_in = tl.minimum(row, INNER - 1) if INNER % BLOCK_I else row
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[None, :] * HIDDEN + k[:, None]
        gate_ptrs = weight_ptr + expert * (2 * INNER * HIDDEN) + row_in[:, None] * HIDDEN + k[None, :]
        up_ptrs = gate_ptrs + INNER * HIDDEN
        gate = tl.zeros([BLOCK_I, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_I, BLOCK_M], tl.float32)
        for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
            if HIDDEN % BLOCK_K:
                inside = begin + k < HIDDEN
                g = tl.load(gate_ptrs + begin, mask=inside[None, :], other=0.0)
                u = tl.load(up_ptrs + begin, mask=inside[None, :], other=0.0)
                x = tl.load(x_ptrs + begin, mask=inside[:, None] & real[None, :], other=0.0)
            else:
                g = tl.load(gate_ptrs + begin)
                u = tl.load(up_ptrs + begin)
                x = tl.load(x_ptrs + begin, mask=real[None, :], other=0.0)
            gate = tl.dot(g, x, gate, input_precision="ieee")
            up = tl.dot(u, x, up, input_precision="ieee")
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * (2 * INNER) + row_in
            gate += tl.load(bias_ptrs).to(tl.float32)[:, None]
            up += tl.load(bias_ptrs + INNER).to(tl.float32)[:, None]
        gated = expert_gate(gate, up, CLAMPED)
        out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * INNER + row[:, None]
        tl.store(out_ptrs, gated.to(out_ptr.dtype.element_ty), mask=real[None, :] & (row < INNER)[:, None])


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def down_blocks(  # type: ignore[no-untyped-def]
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs,
    ids_start,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [T * K, I]; weight [E, N, I]; bias [E, N] or None; out [T * K, N], not yet weighted."""
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if program < num_blocks * COLUMNS:
        block, column = _tile(program, num_blocks, COLUMNS, GROUP_M)
        expert = tl.load(plan_ptr + TABLE_START + block).to(tl.int64)
        pair = tl.load(plan_ptr + ids_start + block * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < num_pairs
        row = column * BLOCK_N + tl.arange(0, BLOCK_N)
        row_in = tl.minimum(row, HIDDEN - 1) if HIDDEN % BLOCK_N else row
        k = tl.arange(0, BLOCK_K)
        hidden_ptrs = hidden_ptr + pair.to(tl.int64)[None, :] * INNER + k[:, None]
        weight_ptrs = weight_ptr + expert * (HIDDEN * INNER) + row_in[:, None] * INNER + k[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for begin in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
            if INNER % BLOCK_K:
                inside = begin + k < INNER
                w = tl.load(weight_ptrs + begin, mask=inside[None, :], other=0.0)
                h = tl.load(hidden_ptrs + begin, mask=inside[:, None] & real[None, :], other=0.0)
            else:
                w = tl.load(weight_ptrs + begin)
                h = tl.load(hidden_ptrs + begin, mask=real[None, :], other=0.0)
            total = tl.dot(w, h, total, input_precision="ieee")
        if bias_ptr is not None:
            total += tl.load(bias_ptr + expert * HIDDEN + row_in).to(tl.float32)[:, None]
        out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * HIDDEN + row[:, None]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=real[None, :] & (row < HIDDEN)[:, None])


@triton.jit
def combine_pairs(  # type: ignore[no-untyped-def]
    out_ptr,
    weights_ptr,
    residual_ptr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual [T, N] += sum over k of weights [T, K] * out [T, K, N], in order of k. Grid (T, N / BLOCK_N)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    wait(PDL)
    release(PDL)
    total = tl.load(residual_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + k)
        y = tl.load(out_ptr + (token * TOP_K + k) * HIDDEN + column, mask=inside, other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(residual_ptr + token * HIDDEN + column, total.to(residual_ptr.dtype.element_ty), mask=inside)

"""Experts for many tokens: products in tiles of one expert each, of pairs that `_moe_sort` has put in order.

Four steps: the sort, `gate_blocks`, `down_blocks`, `combine_pairs`. What lies between the products has a row for every
place of the plan's blocks, so the second product reads rows that follow one another. Weights are the left operand of a
product: its 64 and more rows fill the matrix unit however few tokens an expert has. A block with no more than TAIL
pairs is a smaller product, unless TAIL is BLOCK_M. No atomics, so results do not vary.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import expert_gate
from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._moe_sort import TABLE_START


@triton.jit
def tile_of(program, num_blocks, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's row block and column block; GROUP_M row blocks go through all columns together."""
    group = program // (GROUP_M * COLUMNS)
    first = group * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    within = program % (GROUP_M * COLUMNS)
    return first + within % size, within // size


@triton.jit
def _gate_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    place,
    expert,
    column,
    num_pairs,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of BLOCK_M pairs from `place` on, BLOCK_I columns from `column` on."""
    k = tl.arange(0, BLOCK_K)
    row = column + tl.arange(0, BLOCK_I)
    pair = tl.load(ids_ptr + place + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[None, :] * HIDDEN + k[:, None]
    row_in = tl.minimum(row, INNER - 1) if INNER % BLOCK_I else row
    gate_ptrs = weight_ptr + expert.to(tl.int64) * (2 * INNER * HIDDEN) + row_in[:, None] * HIDDEN + k[None, :]
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
        bias_ptrs = bias_ptr + expert.to(tl.int64) * (2 * INNER) + tl.minimum(row, INNER - 1)
        gate += tl.load(bias_ptrs).to(tl.float32)[:, None]
        up += tl.load(bias_ptrs + INNER).to(tl.float32)[:, None]
    gated = expert_gate(gate, up, CLAMPED).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (place + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :] * INNER + row[:, None]
    if INNER % BLOCK_I:
        tl.store(out_ptrs, gated, mask=(row < INNER)[:, None])
    else:
        tl.store(out_ptrs, gated)


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
    TAIL: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [T, N]; weight [E, 2I, N], gate rows first; bias [E, 2I] or None; out [B * BLOCK_M, I], of every place."""
    COLUMNS: tl.constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    if program < num_blocks * COLUMNS:
        block, index = tile_of(program, num_blocks, COLUMNS, GROUP_M)
        column = index * BLOCK_I
        expert = tl.load(plan_ptr + TABLE_START + block)
        place = block * BLOCK_M
        ids_ptr = plan_ptr + ids_start
        short = tl.load(ids_ptr + place + TAIL % BLOCK_M) == num_pairs
        if TAIL == BLOCK_M:
            _gate_tile(
                x_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, BLOCK_M, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip
        elif short:
            _gate_tile(
                x_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, TAIL, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _gate_tile(
                x_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, BLOCK_M, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit
def _down_tile(  # type: ignore[no-untyped-def]
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    place,
    expert,
    column,
    num_pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    row = column + tl.arange(0, BLOCK_N)
    pair = tl.load(ids_ptr + place + tl.arange(0, BLOCK_M))
    hidden_ptrs = hidden_ptr + (place + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :] * INNER + k[:, None]
    row_in = tl.minimum(row, HIDDEN - 1) if HIDDEN % BLOCK_N else row
    weight_ptrs = weight_ptr + expert.to(tl.int64) * (HIDDEN * INNER) + row_in[:, None] * INNER + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        if INNER % BLOCK_K:
            inside = begin + k < INNER
            w = tl.load(weight_ptrs + begin, mask=inside[None, :], other=0.0)
            h = tl.load(hidden_ptrs + begin, mask=inside[:, None], other=0.0)
        else:
            w = tl.load(weight_ptrs + begin)
            h = tl.load(hidden_ptrs + begin)
        total = tl.dot(w, h, total, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * HIDDEN + tl.minimum(row, HIDDEN - 1))
        total += bias.to(tl.float32)[:, None]
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * HIDDEN + row[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(pair < num_pairs)[None, :] & (row < HIDDEN)[:, None])


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
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [B * BLOCK_M, I]; weight [E, N, I]; bias [E, N] or None; out [T * K, N], not yet weighted."""
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    if program < num_blocks * COLUMNS:
        block, index = tile_of(program, num_blocks, COLUMNS, GROUP_M)
        column = index * BLOCK_N
        expert = tl.load(plan_ptr + TABLE_START + block)
        place = block * BLOCK_M
        ids_ptr = plan_ptr + ids_start
        short = tl.load(ids_ptr + place + TAIL % BLOCK_M) == num_pairs
        if TAIL == BLOCK_M:
            _down_tile(
                hidden_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif short:
            _down_tile(
                hidden_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, TAIL, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _down_tile(
                hidden_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


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

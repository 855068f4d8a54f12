"""As `_moe_grouped`, for so many tokens that the products are bound by what tiles read of the L2 cache.

So tiles are large: rows are the left operand, MAIN and EXTRA of them share the weights, by up to 256 columns, which is
the widest step of Hopper's matrix unit. Weights come through descriptors. Gate and up are one operand whose rows
alternate, so that both of a number lie in one thread in the end. A block has MAIN + EXTRA places; with TAIL, which is
EXTRA where that is not 0, one with no more than MAIN or TAIL pairs is a smaller product. FLAT: programs stay, and go
from tile to tile without a pause in their loads; then all blocks are full ones.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import expert_gate
from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._moe_grouped import tile_of
from services.worker.kernels.impl.triton._moe_sort import TABLE_START


@triton.jit
def _x_ptrs(x_ptr, ids_ptr, place, num_pairs, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the rows of x at the places from `place` on, and where there is a pair; both [ROWS, 1]."""
    pair = tl.load(ids_ptr + place + tl.arange(0, ROWS))
    return x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * HIDDEN, (pair < num_pairs)[:, None]


@triton.jit
def _x_tile(ptrs, real, k, HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns `k` [BLOCK_K] of the rows."""
    if HIDDEN % BLOCK_K:
        return tl.load(ptrs + k[None, :], mask=real & (k < HIDDEN)[None, :], other=0.0)
    else:
        return tl.load(ptrs + k[None, :], mask=real, other=0.0)


@triton.jit
def _store_gated(  # type: ignore[no-untyped-def]
    sums,
    bias_ptr,
    out_ptr,
    place,
    expert,
    column,
    INNER: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """sums [ROWS, 2 * BLOCK_I], gate and up in turn."""
    gate, up = tl.split(sums.reshape(ROWS, BLOCK_I, 2))
    row = column + tl.arange(0, BLOCK_I)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * (2 * INNER) + tl.minimum(row, INNER - 1)
        gate += tl.load(bias_ptrs).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + INNER).to(tl.float32)[None, :]
    gated = expert_gate(gate, up, CLAMPED).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + (place + tl.arange(0, ROWS)).to(tl.int64)[:, None] * INNER + row[None, :]
    if INNER % BLOCK_I:
        tl.store(out_ptrs, gated, mask=(row < INNER)[None, :])
    else:
        tl.store(out_ptrs, gated)


@triton.jit
def _gate_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    weight,
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
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of MAIN + EXTRA places from `place` on, BLOCK_I columns from `column` on."""
    k = tl.arange(0, BLOCK_K)
    ptrs, real = _x_ptrs(x_ptr, ids_ptr, place, num_pairs, TOP_K, HIDDEN, MAIN)
    sums = tl.zeros([MAIN, 2 * BLOCK_I], tl.float32)
    if EXTRA:
        more_ptrs, more_real = _x_ptrs(x_ptr, ids_ptr, place + MAIN, num_pairs, TOP_K, HIDDEN, EXTRA)
        more = tl.zeros([EXTRA, 2 * BLOCK_I], tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        both = weight.load([expert, column, 0, begin]).reshape(2 * BLOCK_I, BLOCK_K)
        left = _x_tile(ptrs, real, begin + k, HIDDEN, BLOCK_K)
        sums = tl.dot(left, both.T, sums, input_precision="ieee")
        if EXTRA:
            also = _x_tile(more_ptrs, more_real, begin + k, HIDDEN, BLOCK_K)
            more = tl.dot(also, both.T, more, input_precision="ieee")
    _store_gated(sums, bias_ptr, out_ptr, place, expert, column, INNER, CLAMPED, MAIN, BLOCK_I)
    if EXTRA:
        _store_gated(more, bias_ptr, out_ptr, place + MAIN, expert, column, INNER, CLAMPED, EXTRA, BLOCK_I)


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def gate_wide(  # type: ignore[no-untyped-def]
    x_ptr,
    weight,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs,
    ids_start,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    CLAMPED: tl.constexpr,
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `gate_blocks`; weight: a descriptor of [E, I, 2, N]."""
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    COLUMNS: tl.constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    if program < num_blocks * COLUMNS:
        block, index = tile_of(program, num_blocks, COLUMNS, GROUP_M)
        column = index * BLOCK_I
        expert = tl.load(plan_ptr + TABLE_START + block)
        place = block * (MAIN + EXTRA)
        ids_ptr = plan_ptr + ids_start
        if TAIL == 0:
            _gate_tile(
                x_ptr, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, MAIN, EXTRA, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip
        elif tl.load(ids_ptr + place + TAIL) == num_pairs:
            _gate_tile(
                x_ptr, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, TAIL, 0, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip
        elif EXTRA == 0 or tl.load(ids_ptr + place + MAIN) == num_pairs:
            _gate_tile(
                x_ptr, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, MAIN, 0, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _gate_tile(
                x_ptr, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                TOP_K, HIDDEN, INNER, CLAMPED, MAIN, EXTRA, BLOCK_I, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit
def _store_pairs(  # type: ignore[no-untyped-def]
    total,
    bias_ptr,
    ids_ptr,
    out_ptr,
    place,
    expert,
    column,
    num_pairs,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """total [ROWS, BLOCK_N], to the rows of the pairs."""
    row = column + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * HIDDEN + tl.minimum(row, HIDDEN - 1))
        total += bias.to(tl.float32)[None, :]
    pair = tl.load(ids_ptr + place + tl.arange(0, ROWS))
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(pair < num_pairs)[:, None] & (row < HIDDEN)[None, :])


@triton.jit
def _down_tile(  # type: ignore[no-untyped-def]
    hidden,
    hidden_more,
    weight,
    bias_ptr,
    ids_ptr,
    out_ptr,
    place,
    expert,
    column,
    num_pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`hidden` in tiles of MAIN rows, `hidden_more` of EXTRA."""
    total = tl.zeros([MAIN, BLOCK_N], tl.float32)
    if EXTRA:
        more = tl.zeros([EXTRA, BLOCK_N], tl.float32)
    for begin in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        right = weight.load([expert, column, begin]).reshape(BLOCK_N, BLOCK_K)
        total = tl.dot(hidden.load([place, begin]), right.T, total, input_precision="ieee")
        if EXTRA:
            more = tl.dot(hidden_more.load([place + MAIN, begin]), right.T, more, input_precision="ieee")
    _store_pairs(total, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs, HIDDEN, MAIN, BLOCK_N)
    if EXTRA:
        _store_pairs(more, bias_ptr, ids_ptr, out_ptr, place + MAIN, expert, column, num_pairs, HIDDEN, EXTRA, BLOCK_N)


@triton.jit(do_not_specialize=["num_pairs", "ids_start"])
def down_wide(  # type: ignore[no-untyped-def]
    hidden,
    hidden_more,
    weight,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs,
    ids_start,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    FLAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `down_blocks`; descriptors: hidden [B * (MAIN + EXTRA), I] in tiles of MAIN rows, hidden_more the same in
    tiles of EXTRA or TAIL, weight [E, N, I]. Any grid.
    """
    wait(PDL)
    release(PDL)
    num_blocks = tl.load(plan_ptr)
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    ids_ptr = plan_ptr + ids_start
    for tile in tl.range(tl.program_id(0), num_blocks * COLUMNS, tl.num_programs(0), flatten=FLAT):
        block, index = tile_of(tile, num_blocks, COLUMNS, GROUP_M)
        column = index * BLOCK_N
        expert = tl.load(plan_ptr + TABLE_START + block)
        place = block * (MAIN + EXTRA)
        if TAIL == 0:
            _down_tile(
                hidden, hidden_more, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, MAIN, EXTRA, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif tl.load(ids_ptr + place + TAIL) == num_pairs:
            _down_tile(
                hidden_more, hidden_more, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, TAIL, 0, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif EXTRA == 0 or tl.load(ids_ptr + place + MAIN) == num_pairs:
            _down_tile(
                hidden, hidden_more, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, MAIN, 0, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _down_tile(
                hidden, hidden_more, weight, bias_ptr, ids_ptr, out_ptr, place, expert, column, num_pairs,
                HIDDEN, INNER, MAIN, EXTRA, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip

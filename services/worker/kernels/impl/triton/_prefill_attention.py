"""Attention of prompts and of chunks of prompts, read straight from the paged KV cache. `prefill` is the one entry.

One program serves BLOCK_M query rows of one KV head: BLOCK_M // GROUP tokens times the GROUP query heads that share the
head, so that keys and values are read once per group. Softmax is online, in float32 and base 2. Key blocks that every
query of the program sees go through a loop without masks. Where programs are too few for the device and the context is
long, the context is split over programs and a second kernel joins the parts.
The grid depends on host numbers only; a program finds its row in `query_starts`. The first call of a kind compiles all
that calls of its kind may need.
"""

from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait
from services.worker.kernels.impl.triton._prefill_parts import Tile as Tile
from services.worker.kernels.impl.triton._prefill_parts import choose_splits, count_blocks, expected_blocks
from services.worker.kernels.impl.triton._prefill_parts import default_tile as default_tile
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.tuned import table

SHORT = 1024  # tokens: contexts up to here may have a tile of their own
LOG2E = 1.4426950408889634
HIDDEN = tl.constexpr(-1.0e30)  # finite, so that a row without a key so far gives no NaN; later keys wipe it out
_COMPILED: set[tuple[object, ...]] = set()  # kinds of calls that `prefill` has compiled all variants for


@triton.jit
def _find_row(starts_ptr, block, first_row, first_token, num_rows, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row r's blocks begin at (its first token) // BLOCK_Q + r, which leaves room for a partial block in every row."""
    found = 0
    for first in range(0, num_rows, 128):
        row = first + tl.arange(0, 128)
        start = tl.load(starts_ptr + first_row + row, mask=row < num_rows, other=0)
        begin = (start - first_token) // BLOCK_Q + row
        found += tl.sum(((begin <= block) & (row < num_rows)).to(tl.int32))
    return found - 1


@triton.jit
def _among(key, least, last, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys to read in place of those that may not be read: behind the end, and in pages before the window."""
    key = tl.minimum(key, last)
    if WINDOW:
        key = tl.maximum(key, least)
    return key.to(tl.uint32)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc,  # float32 [BLOCK_M, BLOCK_E]
    denominator,  # float32 [BLOCK_M]
    peak,  # float32 [BLOCK_M], base 2
    q,  # [BLOCK_M, BLOCK_D]
    position,  # int32 [BLOCK_M]
    low,  # first key, a multiple of BLOCK_N
    high,
    least,  # the first key that may be read
    last,  # the row's last key
    table_ptr,  # int32 [M]: the row's blocks
    k_ptr,
    v_ptr,  # at the KV head
    factor,  # from a product to its logit, base 2
    cap_factor,  # from a product to twice the argument of tanh, base 2
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    k_scale_ptr=None,  # float32 [slots, KV heads] at the KV head, if keys have a scale each
    v_scale_ptr=None,
):
    """Adds keys low .. high - 1."""
    in_block = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    # the table is read one iteration ahead, so that its latency does not stand before that of the keys
    pages = tl.load(table_ptr + _among(low + in_block, least, last, WINDOW) // PAGE)
    for start in tl.range(low, high, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        if MASKED:
            # hidden keys are read from a place that is finite, so that no mask takes registers
            slot = _among(start + in_block, least, last, WINDOW) % PAGE
        elif BLOCK_N % PAGE == 0:
            slot = in_block % PAGE
        else:
            slot = (start + in_block) % PAGE
        place = (pages * PAGE + slot).to(tl.int64) * NUM_KV_HEADS
        pages = tl.load(table_ptr + _among(start + BLOCK_N + in_block, least, last, WINDOW) // PAGE)
        key = start + in_block
        k_ptrs = (k_ptr + place * HEAD_DIM)[:, None] + d[None, :]
        v_ptrs = (v_ptr + place * VALUE_DIM)[:, None] + e[None, :]
        if HEAD_DIM < BLOCK_D:
            k = tl.load(k_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if k_scale_ptr is not None:
            scores *= tl.load(k_scale_ptr + place)[None, :]
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_factor))
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            # scaled before: a product and a sum in one rounding would leave a rest of HIDDEN, too large for exp2
            scores = tl.where(seen, scores * factor, HIDDEN)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            p = tl.exp2(scores - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        peak = new_peak
        denominator = denominator * shrink + tl.sum(p, 1)
        if v_scale_ptr is not None:
            p *= tl.load(v_scale_ptr + place)[None, :]
        acc = acc * shrink[:, None]
        if VALUE_DIM < BLOCK_E:
            v = tl.load(v_ptrs, mask=(e < VALUE_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, denominator, peak


RUNTIME_ONLY = ["first_row", "first_token", "num_rows", "num_tokens", "num_splits", "window", "stride_table"]
SMALL_POINTERS = [
    "starts_ptr",
    "contexts_ptr",
    "tables_ptr",
    "table_rows_ptr",
    "sinks_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
]


@triton.jit(do_not_specialize=RUNTIME_ONLY, do_not_specialize_on_alignment=SMALL_POINTERS)
def prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, H, D]
    k_ptr,  # [blocks, PAGE, K, D]
    v_ptr,  # [blocks, PAGE, K, E]
    out_ptr,  # [T, H, E]; with SPLIT float32 [splits, num_tokens, H, E] of sums not yet divided
    parts_ptr,  # with SPLIT float32 [2, splits, num_tokens, H]: peaks and denominators
    starts_ptr,  # int32 [R + 1]
    contexts_ptr,  # int32 [R]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [R] or None
    sinks_ptr,  # float32 [H] or None
    k_scale_ptr,  # float32 [1] or None; with EACH [blocks, PAGE, K]
    v_scale_ptr,
    factor,
    cap_factor,
    window,
    first_row,
    first_token,
    num_rows,  # from first_row on
    num_tokens,  # from first_token on
    num_splits,
    stride_table,
    stride_qt,
    stride_qh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (KV heads, blocks of BLOCK_M // GROUP tokens, splits)."""
    wait(PDL)
    release(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # last blocks first: they have the longest contexts of their rows
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    local_row = _find_row(starts_ptr, block, first_row, first_token, num_rows, BLOCK_Q)
    row = first_row + local_row
    row_start = tl.load(starts_ptr + row)
    row_tokens = tl.load(starts_ptr + row + 1) - row_start
    first = (block - (row_start - first_token) // BLOCK_Q - local_row) * BLOCK_Q
    if first >= row_tokens:
        return
    context = tl.load(contexts_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr = tables_ptr + table_row.to(tl.int64) * stride_table

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    # rows beyond the end see what the last token sees and are not stored
    position = tl.minimum(context - row_tokens + token, context - 1)
    own = (token < row_tokens) & (m < BLOCK_Q * GROUP)
    mask = own[:, None] & (d < HEAD_DIM)[None, :]
    step_token = (row_start + token).to(tl.int64)
    q = tl.load(q_ptr + (step_token * stride_qt + head * stride_qh)[:, None] + d[None, :], mask=mask, other=0.0)

    k_each = None
    v_each = None
    if EACH:
        k_each = k_scale_ptr + kv_head
        v_each = v_scale_ptr + kv_head
    elif k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
        if SOFTCAP:
            cap_factor *= k_scale
        else:
            factor *= k_scale
        # to float16 they convert at once, exactly, and weights keep three more bits; a query beyond it has no use
        if q.dtype == tl.bfloat16:
            q = q.to(tl.float16)
    peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - known when compiled, the other is not
        if split == 0:
            peak = tl.load(sinks_ptr + head, mask=own, other=0.0) * 1.4426950408889634
            denominator += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    # keys low .. high - 1 are seen by some query, lead .. full - 1 by all
    first_position = context - row_tokens + first
    high = tl.minimum(first_position + BLOCK_Q, context)
    full = (first_position + 1) // BLOCK_N * BLOCK_N
    low = 0
    lead = 0
    least = 0
    if WINDOW:
        least = tl.maximum(first_position - window + 1, 0)
        low = least // BLOCK_N * BLOCK_N
        lead = (tl.maximum(high - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), num_splits) * BLOCK_N
        low = low + split * share
        high = tl.minimum(high, low + share)
    lead = tl.maximum(low, lead)
    last = context - 1
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * VALUE_DIM
    if WINDOW:
        acc, denominator, peak = _attend(
            acc, denominator, peak, q, position, low, tl.minimum(lead, high), least, last, table_ptr, k_ptr, v_ptr,
            factor, cap_factor, window, NUM_KV_HEADS,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_N, PAGE, True, WINDOW, SOFTCAP, k_each, v_each,
        )  # fmt: skip
    acc, denominator, peak = _attend(
        acc, denominator, peak, q, position, lead, tl.minimum(full, high), least, last, table_ptr, k_ptr, v_ptr,
        factor, cap_factor, window, NUM_KV_HEADS,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_N, PAGE, False, WINDOW, SOFTCAP, k_each, v_each,
    )  # fmt: skip
    acc, denominator, peak = _attend(
        acc, denominator, peak, q, position, tl.maximum(lead, full), high, least, last, table_ptr, k_ptr, v_ptr,
        factor, cap_factor, window, NUM_KV_HEADS,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_N, PAGE, True, WINDOW, SOFTCAP, k_each, v_each,
    )  # fmt: skip

    # read again, so that nothing of this holds registers in the loops: there they are short
    row_start = tl.load(starts_ptr + row, volatile=True)
    row_tokens = tl.load(starts_ptr + row + 1, volatile=True) - row_start
    token = (block - (row_start - first_token) // BLOCK_Q - local_row) * BLOCK_Q + m // GROUP
    own = (token < row_tokens) & (m < BLOCK_Q * GROUP)
    e = tl.arange(0, BLOCK_E)
    mask = own[:, None] & (e < VALUE_DIM)[None, :]
    step_token = (row_start + token).to(tl.int64)
    if SPLIT:
        part = (split.to(tl.int64) * num_tokens + step_token - first_token) * (NUM_KV_HEADS * GROUP) + head
        tl.store(parts_ptr + part, peak, mask=own)
        tl.store(
            parts_ptr + num_splits.to(tl.int64) * num_tokens * (NUM_KV_HEADS * GROUP) + part, denominator, mask=own
        )
        tl.store(out_ptr + (part * VALUE_DIM)[:, None] + e[None, :], acc, mask=mask)
    else:
        inverse = 1.0 / denominator
        if v_scale_ptr is not None and not EACH:
            inverse *= tl.load(v_scale_ptr)
        if VALUE_SCALE != 1.0:
            inverse *= VALUE_SCALE
        out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
        place = (step_token * (NUM_KV_HEADS * GROUP) + head) * VALUE_DIM
        tl.store(out_ptr + place[:, None] + e[None, :], out, mask=mask)


JOIN_RUNTIME_ONLY = ["first_token", "num_tokens", "num_splits"]


@triton.jit(do_not_specialize=JOIN_RUNTIME_ONLY, do_not_specialize_on_alignment=["v_scale_ptr"])
def join_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,  # float32 [splits, num_tokens, H, E]
    parts_ptr,  # float32 [2, splits, num_tokens, H]
    out_ptr,  # [T, H, E]
    v_scale_ptr,  # float32 [1] or None
    first_token,
    num_tokens,
    num_splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, blocks of BLOCK_H heads). A part without keys has a denominator and sums of zero."""
    wait(PDL)
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    own = head < NUM_HEADS
    mask = own[:, None] & (e < VALUE_DIM)[None, :]
    stride_split = num_tokens.to(tl.int64) * NUM_HEADS
    part = token * NUM_HEADS + head
    peak = tl.full([BLOCK_H], HIDDEN, tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    for _ in range(num_splits):
        own_peak = tl.load(parts_ptr + part, mask=own, other=0.0)
        own_denominator = tl.load(parts_ptr + num_splits * stride_split + part, mask=own, other=1.0)
        sums = tl.load(sums_ptr + (part * VALUE_DIM)[:, None] + e[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, own_peak)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(own_peak - new_peak)
        denominator = denominator * shrink + own_denominator * weight
        acc = acc * shrink[:, None] + sums * weight[:, None]
        peak = new_peak
        part += stride_split
    inverse = 1.0 / denominator
    if v_scale_ptr is not None:
        inverse *= tl.load(v_scale_ptr)
    if VALUE_SCALE != 1.0:
        inverse *= VALUE_SCALE
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    place = ((first_token + token) * NUM_HEADS + head) * VALUE_DIM
    tl.store(out_ptr + place[:, None] + e[None, :], out, mask=mask)


def prefill(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    spec: AttentionSpec,
    first_row: int,
    first_token: int,
) -> None:
    """Writes out[first_token:] for the rows from `first_row` on, whose tokens begin at `first_token`.

    q: [T, H, D], last dimension dense; out: [T, H, E], k_cache: [blocks, B, K, D], v_cache: [.., E], all contiguous.
    """
    if q.shape[0] == first_token:
        return
    sight = _sight(q, (k_cache, v_cache), rows, spec, first_row, first_token)
    tiles, plan, kind = _choose(sight, q.dtype, k_cache.dtype, rows.max_context)
    kind = (kind, rows.table_rows is None, spec.sinks is None)
    if kind not in _COMPILED:
        assert k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous() and q.stride(2) == 1
        # whichever of them a later step needs, it does not wait for a compiler
        for tile in tiles:
            for splits in (1, 2):
                _run(q, out, k_cache, v_cache, rows, spec, _plan(sight, tile, splits), compile_only=True)
        _COMPILED.add(kind)
    _run(q, out, k_cache, v_cache, rows, spec, plan)


def launch(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    spec: AttentionSpec,
    first_row: int,
    first_token: int,
    tile: Tile,
    num_splits: int,
) -> None:
    """As `prefill`, with the choices made."""
    plan = _plan(_sight(q, (k_cache, v_cache), rows, spec, first_row, first_token), tile, num_splits)
    _run(q, out, k_cache, v_cache, rows, spec, plan)


class Sight(NamedTuple):
    """What the host sees of a call; the same in all layers of a step, so that choices are made once."""

    device: torch.device
    q_shape: torch.Size
    q_stride: tuple[int, ...]
    k_shape: torch.Size
    num_rows: int
    table_stride: int
    first_row: int
    first_token: int
    scale: float
    window: int
    softcap: float
    value_dim: int
    value_scale: float

    @property
    def group(self) -> int:
        return self.q_shape[1] // self.k_shape[2]


class Plan(NamedTuple):
    """A call's launches, except for the tensors."""

    grid: tuple[int, int, int]
    numbers: tuple[int | float | bool, ...]  # after the tensors
    options: dict[str, Any]
    sums: tuple[int, ...]  # shape of the parts' sums; empty without parts
    join_grid: tuple[int, int]
    join_numbers: tuple[int | float, ...]


def _sight(
    q: Tensor, caches: tuple[Tensor, Tensor], rows: AttentionRows, spec: AttentionSpec, first_row: int, first_token: int
) -> Sight:
    tables, starts = rows.block_tables, rows.query_starts
    return Sight(
        q.device, q.shape, q.stride(), caches[0].shape, starts.shape[0] - 1 - first_row, tables.stride(0),
        first_row, first_token, spec.scale, spec.window, spec.softcap, caches[1].shape[3], spec.value_scale,
    )  # fmt: skip


@lru_cache(256)
def _choose(
    sight: Sight, dtype: torch.dtype, kv_dtype: torch.dtype, max_context: int
) -> tuple[tuple[Tile, Tile], Plan, tuple[object, ...]]:
    """Tiles for long and short contexts, this call's launches, and what kind of call it is."""
    head_dim, group, num_kv_heads = sight.q_shape[2], sight.group, sight.k_shape[2]
    long = choose_tile(sight.device, dtype, kv_dtype, head_dim, group, False)
    short = choose_tile(sight.device, dtype, kv_dtype, head_dim, group, True)
    tile = short if max_context <= SHORT else long
    num_tokens = sight.q_shape[0] - sight.first_token
    programs = expected_blocks(num_tokens, sight.num_rows, tile.block_m // group) * num_kv_heads
    span = min(max_context, sight.window + tile.block_m) if sight.window else max_context
    part_bytes = num_tokens * sight.q_shape[1] * sight.value_dim * 4
    plan = _plan(sight, tile, choose_splits(programs, span, part_bytes, sight.device))
    shapes = (*sight.q_shape[1:], *sight.q_stride, *sight.k_shape[1:], sight.value_dim, sight.value_scale)
    return (long, short), plan, (sight.device, dtype, kv_dtype, shapes, sight.window > 0, sight.softcap > 0)


def _plan(sight: Sight, tile: Tile, num_splits: int) -> Plan:
    num_tokens, num_heads, head_dim = sight.q_shape[0] - sight.first_token, sight.q_shape[1], sight.q_shape[2]
    page, num_kv_heads, group = sight.k_shape[1], sight.k_shape[2], sight.group
    value_dim = sight.value_dim
    block_d, block_e = (max(16, triton.next_power_of_2(width)) for width in (head_dim, value_dim))
    if sight.softcap:
        factor, cap_factor = sight.softcap * LOG2E, 2 * LOG2E * sight.scale / sight.softcap
    else:
        factor, cap_factor = sight.scale * LOG2E, 0.0
    numbers = (
        factor, cap_factor, sight.window, sight.first_row, sight.first_token, sight.num_rows, num_tokens, num_splits,
        sight.table_stride, sight.q_stride[0], sight.q_stride[1],
        num_kv_heads, group, head_dim, value_dim, sight.value_scale, block_d, block_e, tile.block_m, tile.block_n, page,
        sight.window > 0, sight.softcap > 0, num_splits > 1,
    )  # fmt: skip
    own: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers and torch.version.hip is None:
        own["maxnreg"] = tile.max_registers
    block_h = min(8, triton.next_power_of_2(num_heads))
    return Plan(
        grid=(num_kv_heads, count_blocks(num_tokens, sight.num_rows, tile.block_m // group), num_splits),
        numbers=numbers,
        options={**own, **options(sight.device)},
        sums=(num_splits, num_tokens, num_heads, value_dim) if num_splits > 1 else (),
        join_grid=(num_tokens, triton.cdiv(num_heads, block_h)),
        join_numbers=(
            sight.first_token,
            num_tokens,
            num_splits,
            num_heads,
            value_dim,
            sight.value_scale,
            block_e,
            block_h,
        ),
    )


def _run(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    spec: AttentionSpec,
    plan: Plan,
    compile_only: bool = False,
) -> None:
    k_scale, v_scale = spec.kv_scale or (None, None)
    each = spec.kv_scale is not None and spec.kv_scale.each
    target, parts = out, None
    if plan.sums:
        size = (0, *plan.sums[1:]) if compile_only else plan.sums
        target = torch.empty(size, dtype=torch.float32, device=q.device)
        parts = torch.empty((2, *size[:3]), dtype=torch.float32, device=q.device)
    run = partial(prefill_kernel.warmup, grid=plan.grid) if compile_only else prefill_kernel[plan.grid]
    run(
        q, k_cache, v_cache, target, parts,
        rows.query_starts, rows.context_lens, rows.block_tables, rows.table_rows, spec.sinks, k_scale, v_scale,
        *plan.numbers, EACH=each, **plan.options,
    )  # fmt: skip
    if plan.sums:
        join = partial(join_kernel.warmup, grid=plan.join_grid) if compile_only else join_kernel[plan.join_grid]
        join(target, parts, out, None if each else v_scale, *plan.join_numbers, num_warps=4, **options(q.device))


@cache
def choose_tile(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, short: bool
) -> Tile:
    """From the table of this GPU if it has a row for the head size and the cache's width, else a sane one."""
    wanted = {"head_dim": head_dim, "kv_bytes": kv_dtype.itemsize, "short": short}
    chosen = default_tile(dtype.itemsize, head_dim, device.type != "cuda" or torch.version.hip is not None)
    for row in table("prefill_attention", device) if dtype.itemsize == 2 else ():
        if all(row[name] == value for name, value in wanted.items()):
            chosen = Tile(*(int(row[name]) for name in Tile._fields))
    return chosen._replace(block_m=max(chosen.block_m, triton.next_power_of_2(group)))


def forget_choices() -> None:
    """After the table has changed."""
    choose_tile.cache_clear()
    _choose.cache_clear()


def _aot(
    name: str, head_dim: int, group: int, amd: bool, extras: bool = False, split: bool = False, value_dim: int = 0
) -> AotCase:
    """`extras`: everything optional at once, with 8-bit keys and values."""
    tile = default_tile(2, head_dim, small_lds=amd)
    kv, scale = ("*fp8e4nv:16", "*fp32") if extras else ("*bf16:16", None)
    signature: dict[str, Constant] = dict.fromkeys(RUNTIME_ONLY, "i32")
    signature |= {"stride_qt": "i32:16", "stride_qh": "i32:16", "NUM_KV_HEADS": 8}
    signature |= dict.fromkeys(("starts_ptr", "contexts_ptr", "tables_ptr", "table_rows_ptr"), "*i32")
    signature |= {"q_ptr": "*bf16:16", "k_ptr": kv, "v_ptr": kv, "out_ptr": "*fp32:16" if split else "*bf16:16"}
    signature |= {"parts_ptr": "*fp32:16" if split else None, "sinks_ptr": "*fp32" if extras else None}
    signature |= {"k_scale_ptr": scale, "v_scale_ptr": scale, "factor": "fp32", "cap_factor": "fp32"}
    signature |= {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "PAGE": 16}
    signature |= {"VALUE_DIM": value_dim or head_dim, "BLOCK_E": triton.next_power_of_2(value_dim or head_dim)}
    signature["VALUE_SCALE"] = 0.707 if value_dim else 1.0
    signature |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PDL": False}
    signature |= {"WINDOW": extras, "SOFTCAP": extras, "SPLIT": split, "EACH": False}
    targets = ("gfx942", "gfx950") if amd else ("sm_90",)
    return AotCase(name, prefill_kernel, signature, tile.num_warps, tile.num_stages, hot=False, targets=targets)


def _aot_join(name: str, head_dim: int) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(JOIN_RUNTIME_ONLY, "i32")
    signature |= {"sums_ptr": "*fp32:16", "parts_ptr": "*fp32:16", "out_ptr": "*bf16:16", "v_scale_ptr": None}
    signature |= {"NUM_HEADS": 32, "VALUE_DIM": head_dim, "BLOCK_E": triton.next_power_of_2(head_dim), "BLOCK_H": 8}
    return AotCase(name, join_kernel, signature | {"VALUE_SCALE": 1.0, "PDL": False}, hot=False)


AOT: tuple[AotCase, ...] = (
    *(
        _aot(f"{head_dim}_{'amd' if amd else 'nvidia'}", head_dim, group, amd)
        for head_dim, group in ((64, 3), (128, 4), (192, 2), (256, 2))
        for amd in (True, False)
    ),
    *(_aot(f"128_extras_split_{'amd' if amd else 'nvidia'}", 128, 8, amd, True, True) for amd in (True, False)),
    *(_aot(f"192_values128_{'amd' if amd else 'nvidia'}", 192, 8, amd, value_dim=128) for amd in (True, False)),
    _aot_join("join_128", 128),
)

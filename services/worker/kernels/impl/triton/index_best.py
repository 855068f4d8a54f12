"""The best positions of a context, as slots, by four launches whose shapes depend on no context.

Scores compare as keys, int32 that order as they do. LANES is twice TOP_K, as a power of two (4,096 of 2,048).
- `index_tops`: a row's positions are dealt to LANES groups, of which each leaves its highest key.
- `index_bound`: a key that TOP_K groups reach, and hardly more. So at least TOP_K positions reach it, and the best are
  among them; of scores that know nothing of the groups they are 1.4 times TOP_K (ln 2 of LANES), however long the row.
- `index_lists`: which positions of each stretch of LANES reach it.
- `index_take`: what lies in these lists, in registers, is cut at exactly TOP_K. Where more than LANES lie in them, as
  of very many equal scores, the row itself is read as often as it takes (some 20 us a time for 131,072 positions).
Contexts of at most LANES need the last one only, such of at most TOP_K no scores.

On paper, an H200: a launch of a graph takes 1.5 to 3 us with what each program waits for, so 8 to 12 us of few rows.
Scores are read twice: 0.5 MB a row of 131,072, from the second-level cache where `index_scores` has left them there;
34 MB of 64 rows are 7 us at 4.8 TB/s each time. In the machine code of sm_90 a score costs 17 instructions in
`index_tops` and 46 in `index_lists`: 18 us of 64 rows on 132 processors, beside the bytes. Where all contexts are short
four launches of programs that end at once remain, some 6 us. A histogram for each digit would need no search, but has
four passes, and `tl.histogram` takes 39 instructions a score for 256 bins, 8 of them counts of bits, an eighth as fast.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._floors import LOWEST, key_of
from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.index_best import index_best
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl

COLUMNS = 128  # groups of a program
DEEP = 16  # positions of each that are there at once
WARPS = 8  # of programs with LANES keys
LEAST_STRETCHES = 64  # so that all contexts of up to 262,144 tokens share a compiled kernel

# Group g has positions of every stretch, each TURN lanes further than in the one before, so that what a text repeats
# all 4,096 or 128 tokens is not in one group: 4,096 + 907 is prime.
TURN = tl.constexpr(907)
SLACK = tl.constexpr(32)  # a bound that one in so many more groups reach than have to is good enough
HIGHEST = tl.constexpr(2**31 - 1)
NOTHING = tl.constexpr(-(2**31))  # below all keys
INFINITE = tl.constexpr(0x7F800000)  # the key of inf
SINGLES = ("context_ptr", "tables_ptr", "table_rows_ptr")


@triton.jit
def _keys(scores_ptr, mask):  # type: ignore[no-untyped-def]
    """NaN is the highest, -0.0 is 0.0."""
    key = key_of(tl.load(scores_ptr, mask=mask, other=0.0))
    key = tl.where((key > INFINITE) | (key < LOWEST), HIGHEST, tl.where(key == -1, 0, key))
    return tl.where(mask, key, NOTHING)


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def index_tops(  # type: ignore[no-untyped-def]
    scores_ptr,  # float32 [R, line]
    line,
    context_ptr,  # int32 [R]
    tops_ptr,  # int32 [R, LANES]
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (LANES / COLUMNS, R)."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(context_ptr + row)
    if context > LANES:
        group = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        highest = tl.full([DEEP, COLUMNS], NOTHING, tl.int32)
        scores_ptr += row * line
        for first in range(0, context, DEEP * LANES):
            stretch = first // LANES + tl.arange(0, DEEP)[:, None]
            position = stretch * LANES + ((group[None, :] + stretch * TURN) & (LANES - 1))
            highest = tl.maximum(highest, _keys(scores_ptr + position, position < context))
        tl.store(tops_ptr + row * LANES + group, tl.max(highest, 0))


@triton.jit
def _border(keys, least, most):  # type: ignore[no-untyped-def]
    """(lo, hi, above): at least `least` keys reach lo, `above` of them hi, which are fewer than `least`.

    Either hi is the next key behind lo, or at most `most` reach lo. int64, since hi may be behind all keys.
    """
    lo = tl.min(tl.where(keys == NOTHING, HIGHEST, keys)).to(tl.int64)
    hi = tl.max(keys).to(tl.int64) + 1
    above = 0
    searching = hi > lo + 1
    while searching:
        middle = (lo + hi) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        enough = count >= least
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle)
        above = tl.where(enough, above, count)
        searching = (hi > lo + 1) & ((count < least) | (count > most))
    return lo, hi, above


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def index_bound(  # type: ignore[no-untyped-def]
    context_ptr,
    tops_ptr,  # int32 [R, LANES]
    bounds_ptr,  # int32 [R]
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(context_ptr + row) > LANES:
        keys = tl.load(tops_ptr + row * LANES + tl.arange(0, LANES))
        border = _border(keys, TOP_K, TOP_K + TOP_K // SLACK)
        tl.store(bounds_ptr + row, border[0].to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def index_lists(  # type: ignore[no-untyped-def]
    scores_ptr,
    line,
    context_ptr,
    bounds_ptr,
    lists_ptr,  # int16 [R, stretches of the grid, LANES]: places in a stretch
    counts_ptr,  # int32 [R, STRETCHES]
    STRETCHES: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (stretches, R)."""
    release(PDL)
    wait(PDL)
    stretch, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    context = tl.load(context_ptr + row)
    if (context > LANES) & (stretch * LANES < context):
        lane = tl.arange(0, LANES)
        position = stretch * LANES + lane
        keys = _keys(scores_ptr + row * line + position, position < context)
        taken = keys >= tl.load(bounds_ptr + row)
        rank = tl.cumsum(taken.to(tl.int32))
        lists_ptr += (row * tl.num_programs(0) + stretch) * LANES
        tl.store(lists_ptr + rank - 1, lane.to(tl.int16), mask=taken)
        tl.store(counts_ptr + row * STRETCHES + stretch, tl.sum(taken.to(tl.int32)))


@triton.jit
def _listed(  # type: ignore[no-untyped-def]
    lists_ptr, counts_ptr, stretches, STRETCHES: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr
):
    """(positions, whether there is one, how many there are): the first LANES of a row's lists, one behind the other."""
    number, lane = tl.arange(0, STRETCHES), tl.arange(0, LANES)
    ends = tl.cumsum(tl.load(counts_ptr + number, mask=number < stretches, other=0))
    count = tl.max(ends)
    tl.debug_barrier()
    tl.store(counts_ptr + number, ends)  # nobody else reads them
    tl.debug_barrier()
    stretch = tl.zeros([LANES], tl.int32)  # such before it that end at the lane or earlier
    for bit in tl.static_range(BITS):
        step = STRETCHES >> (bit + 1)
        stretch += tl.where(tl.load(counts_ptr + stretch + step - 1) <= lane, step, 0)
    begin = tl.load(counts_ptr + stretch - 1, mask=stretch > 0, other=0)
    real = lane < count
    place = tl.load(lists_ptr + stretch * LANES + lane - begin, mask=real, other=0)
    return stretch * LANES + place.to(tl.int32), real, count


@triton.jit
def _search_row(scores_ptr, context, bound, TOP_K: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_border`, of all keys of a row, of which at least TOP_K reach `bound`; above: how many reach hi."""
    lane = tl.arange(0, LANES)
    lo, hi, above = bound.to(tl.int64), tl.full((), HIGHEST, tl.int32).to(tl.int64) + 1, 0
    searching = hi > lo + 1
    while searching:
        middle = ((lo + hi) >> 1).to(tl.int32)
        reached = tl.zeros([LANES], tl.int32)
        under = tl.full([LANES], NOTHING, tl.int32)
        over = tl.full([LANES], HIGHEST, tl.int32)
        for first in range(0, context, LANES):
            position = first + lane
            keys = _keys(scores_ptr + position, position < context)
            reached += (keys >= middle).to(tl.int32)
            under = tl.maximum(under, tl.where(keys < middle, keys, NOTHING))
            over = tl.minimum(over, tl.where(keys >= middle, keys, HIGHEST))
        count = tl.sum(reached)
        # lo and hi - 1 are keys of the row from here on, so that equals are found at once
        enough = count >= TOP_K
        lo = tl.where(enough, tl.min(over).to(tl.int64), lo)
        hi = tl.where(enough, hi, tl.max(under).to(tl.int64) + 1)
        above = tl.where(enough, above, count)
        searching = (hi > lo + 1) & (count != TOP_K)
    return lo, hi, above


@triton.jit
def _slots(table_ptr, position, mask, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(table_ptr + position // PAGE, mask=mask, other=0) * PAGE + position % PAGE


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    out_ptr, table_ptr, keys, position, border, written, equals, TOP_K: tl.constexpr, PAGE: tl.constexpr
):
    """The slots of those that are kept, behind `written` others, and how many; `equals`: keys of [lo, hi) before."""
    lo, hi, above = border
    inside = ((keys >= lo) & (keys < hi)).to(tl.int32)
    kept = (keys >= hi) | ((inside > 0) & (equals + tl.cumsum(inside) <= TOP_K - above))
    rank = written + tl.cumsum(kept.to(tl.int32))
    tl.store(out_ptr + rank - 1, _slots(table_ptr, position, kept, PAGE), mask=kept & (rank <= TOP_K))
    return written + tl.sum(kept.to(tl.int32)), equals + tl.sum(inside)


@triton.jit(do_not_specialize=["table_stride", "stretches", "kept"], do_not_specialize_on_alignment=SINGLES)
def index_take(  # type: ignore[no-untyped-def]
    scores_ptr,
    line,
    context_ptr,
    tables_ptr,  # int32 [.., table_stride]
    table_rows_ptr,  # int32 [R] or None
    table_stride,
    bounds_ptr,
    lists_ptr,
    counts_ptr,
    out_ptr,  # int32 [R, kept]
    stretches,  # of a row of lists
    kept,  # TOP_K, or all columns where these are fewer
    TOP_K: tl.constexpr,
    STRETCHES: tl.constexpr,
    BITS: tl.constexpr,  # STRETCHES is 2 to this power
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    context = tl.load(context_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row).to(tl.int64)
    table_ptr = tables_ptr + table_row * table_stride
    scores_ptr += row * line
    out_ptr += row * kept
    lane = tl.arange(0, LANES)
    if context <= TOP_K:
        slots = tl.where(lane < context, _slots(table_ptr, lane, lane < context, PAGE), 0)
        tl.store(out_ptr + lane, slots, mask=lane < kept)
    else:
        position, real, count = lane, lane < context, context
        if context > LANES:
            used = (context + LANES - 1) // LANES
            row_lists = lists_ptr + row * stretches * LANES
            position, real, count = _listed(row_lists, counts_ptr + row * STRETCHES, used, STRETCHES, BITS, LANES)
        if count <= LANES:
            keys = _keys(scores_ptr + position, real)
            border = _border(keys, TOP_K, TOP_K)
            _write(out_ptr, table_ptr, keys, position, border, 0, 0, TOP_K, PAGE)
        else:
            border = _search_row(scores_ptr, context, tl.load(bounds_ptr + row), TOP_K, LANES)
            written, equals = 0, 0
            for first in range(0, context, LANES):
                keys = _keys(scores_ptr + first + lane, first + lane < context)
                written, equals = _write(out_ptr, table_ptr, keys, first + lane, border, written, equals, TOP_K, PAGE)


def lanes_of(top_k: int) -> int:
    """At least a program's groups, and twice `top_k`."""
    return max(2 * int(triton.next_power_of_2(top_k)), 16)


def stretches_of(columns: int, lanes: int) -> int:
    """Of which a program looks at all counts: a power of two."""
    return max(int(triton.next_power_of_2(triton.cdiv(columns, lanes))), LEAST_STRETCHES)


def run(scores: Tensor, rows: AttentionRows, top_k: int) -> Tensor:
    (num_rows, line), page = scores.shape, rows.block_tokens
    kept, lanes = min(top_k, line), lanes_of(top_k)
    out = torch.empty((num_rows, kept), dtype=torch.int32, device=scores.device)
    if not num_rows:
        return out
    grid = triton.cdiv(line, lanes)
    stretches = stretches_of(max(line, rows.block_tables.shape[1] * page), lanes)
    sizes = (lanes, 1, stretches)  # of a row's tops, bound and counts
    tops, bounds, counts = (torch.empty((num_rows, n), dtype=torch.int32, device=scores.device) for n in sizes)
    lists = torch.empty((num_rows, grid, lanes), dtype=torch.int16, device=scores.device)
    context, shared = rows.context_lens, {"LANES": lanes, "num_warps": WARPS, **options(scores.device)}
    if grid > 1:  # else no context is so long
        columns = min(COLUMNS, lanes)
        tiles = shared | {"COLUMNS": columns, "DEEP": DEEP, "num_warps": WARPS // 2}
        index_tops[(lanes // columns, num_rows)](scores, line, context, tops, **tiles)
        index_bound[(num_rows,)](context, tops, bounds, TOP_K=top_k, **shared)
        index_lists[(grid, num_rows)](scores, line, context, bounds, lists, counts, STRETCHES=stretches, **shared)
    index_take[(num_rows,)](
        scores,
        line,
        context,
        rows.block_tables,
        rows.table_rows,
        rows.block_tables.stride(0),
        bounds,
        lists,
        counts,
        out,
        grid,
        kept,
        TOP_K=top_k,
        STRETCHES=stretches,
        BITS=stretches.bit_length() - 1,
        PAGE=page,
        **shared,
    )
    return out


IMPL = Impl(index_best, "triton", run, needs_gpu)


def _aot() -> tuple[AotCase, ...]:
    """Of DeepSeek-V3.2 and GLM-5, which choose 2,048 tokens."""
    top_k, lanes = 2048, lanes_of(2048)
    sizes = {"LANES": lanes, "PDL": False}
    row: dict[str, Constant] = {"scores_ptr": "*fp32:16", "line": "i32:16", "context_ptr": "*i32"}
    kept: dict[str, Constant] = {"bounds_ptr": "*i32:16", "lists_ptr": "*i16:16", "counts_ptr": "*i32:16"}
    tops: dict[str, Constant] = {"tops_ptr": "*i32:16"}
    table: dict[str, Constant] = {"tables_ptr": "*i32", "table_rows_ptr": "*i32", "table_stride": "i32"}
    more = {"TOP_K": top_k, "STRETCHES": LEAST_STRETCHES, "BITS": LEAST_STRETCHES.bit_length() - 1, "PAGE": 16}
    best = row | table | kept | {"out_ptr": "*i32:16", "stretches": "i32", "kept": "i32"} | sizes | more
    bound = {"context_ptr": "*i32", **tops, "bounds_ptr": "*i32:16", "TOP_K": top_k} | sizes
    return (
        AotCase("tops", index_tops, row | tops | sizes | {"COLUMNS": COLUMNS, "DEEP": DEEP}, WARPS // 2),
        AotCase("bound", index_bound, bound, WARPS),
        AotCase("lists", index_lists, row | kept | sizes | {"STRETCHES": LEAST_STRETCHES}, WARPS),
        AotCase("best", index_take, best, WARPS),
    )


AOT = _aot()

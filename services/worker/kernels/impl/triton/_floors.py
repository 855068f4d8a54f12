"""The lowest logit that top-k, top-p and min-p keep, without sorting: a search for the border among the logits.

Shapes: S rows, V tokens, C chunks of CHUNK tokens, tiles of TILE tokens. One program per row. Floats compare as their
keys, int32 that grow with them. The border lies in [lo, hi): reached from above at lo, not yet at hi. A pass adds up
what lies at or above PIVOTS keys between them, and also finds the lowest and the highest logit in [lo, hi), so equal
logits end the search at once. Passes read only the tiles whose maximum (of `chunk_stats`) is not below lo.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait
from services.worker.kernels.impl.triton._sampling import (
    CHUNK,
    LEAST_CHUNKS,
    LOG2_E,
    SINGLES,
    aot_stats,
    load_logits,
    run_stats,
    weights,
)
from services.worker.kernels.impl.triton._value_counts import borders

TILE = 2048
LEAST_TILES = 128  # so that the vocabularies of today share a compiled kernel
PIVOTS = 8
WARPS = 8
COUNTED_ROWS = 8  # of 16 bits; of more rows a search takes less than counts, which all tokens go through
FEW_ROWS = 64  # up to here programs are fewer than processors, and each has one for itself
FEW_WARPS = 16  # no more than what has 1024 threads on AMD

NO_KEY = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def key_of(x):  # type: ignore[no-untyped-def]
    """int32 that orders as float32 does; -0.0 is just below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """The inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _list_tiles(places_ptr, tile_tops, lo, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the numbers of the tiles whose maximum is not below lo, and returns how many they are."""
    live = tile_tops >= value_of(lo)
    tl.debug_barrier()  # the last list has been read
    tl.store(places_ptr + tl.cumsum(live.to(tl.int32)) - 1, tl.arange(0, TILES), mask=live)
    count = tl.sum(live.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    row_ptr, places_ptr, tile_tops, lo, hi, few_ptr, V, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Writes the logits of [lo, hi) one after the other, TILE of them at most, and returns how many there are."""
    count = _list_tiles(places_ptr, tile_tops, lo, TILES)
    lane = tl.arange(0, TILE)
    found = 0
    offset = tl.load(places_ptr) * TILE + lane
    ahead = load_logits(row_ptr + offset, offset < V)
    for i in range(count):
        x = ahead
        more = i + 1 < count
        offset = tl.load(places_ptr + i + 1, mask=more, other=0) * TILE + lane
        ahead = load_logits(row_ptr + offset, (offset < V) & more)
        key = key_of(x)
        inside = (key >= lo) & (key < hi) & (key > LOWEST)
        rank = found + tl.cumsum(inside.to(tl.int32))
        tl.store(few_ptr + rank - 1, x, mask=inside & (rank <= TILE))
        found += tl.sum(inside.to(tl.int32))
    tl.debug_barrier()
    return found


@triton.jit
def _pass(  # type: ignore[no-untyped-def]
    row_ptr,
    places_ptr,
    tile_tops,
    top,
    scale,
    lo,
    hi,
    pivots,
    weighed,
    V,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """What lies at or above each pivot, float64 [PIVOTS], and the lowest and the highest finite key in [lo, hi).

    pivots: int32 [PIVOTS, 1], above lo. A token weighs exp((logit - top) / temperature) if `weighed`, else 1.
    """
    count = _list_tiles(places_ptr, tile_tops, lo, TILES)
    lane = tl.arange(0, TILE)[None, :]
    reached = tl.zeros([PIVOTS, TILE], tl.float32)
    low = tl.full([1, TILE], NO_KEY, tl.int32)
    high = tl.full([1, TILE], LOWEST, tl.int32)
    offset = tl.load(places_ptr) * TILE + lane
    ahead = load_logits(row_ptr + offset, offset < V)
    for i in range(count):
        x = ahead
        # the next tile is on its way while this one is added up
        more = i + 1 < count
        offset = tl.load(places_ptr + i + 1, mask=more, other=0) * TILE + lane
        ahead = load_logits(row_ptr + offset, (offset < V) & more)
        key = key_of(x)
        weight = tl.where(weighed, weights(x, top, scale), 1.0)
        reached += tl.where(key >= pivots, weight, 0.0)
        low = tl.minimum(low, tl.where((key >= lo) & (key > LOWEST), key, NO_KEY))
        high = tl.maximum(high, tl.where(key < hi, key, LOWEST))
    return tl.sum(reached.to(tl.float64), 1), tl.min(low), tl.max(high)


@triton.jit
def _choose_pivots(lo, hi, top, spread, step, PIVOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 [PIVOTS, 1] above lo and below hi, which are more than 1 apart.

    spread: a guess of how far below the top the border is, for when nothing is known (lo is the key of -inf).
    """
    number = tl.arange(0, PIVOTS)[:, None]
    low, high = lo.to(tl.int64), hi.to(tl.int64)
    by_key = low + (high - low) * (number + 1) // (PIVOTS + 1)
    value = value_of(lo) + (value_of(hi) - value_of(lo)) * ((number + 1) / (PIVOTS + 1))
    # -inf tells nothing of distances: whether anything finite is enough, then steps that double
    value = tl.where(lo == LOWEST, tl.where(number == 0, float("-inf"), top - spread * (1 << number)), value)
    # parts equal in keys, every third time, end the search even where values round onto each other
    by_value = (step % 3 < 2) & ((lo > LOWEST) | (step == 0))
    pivots = tl.where(by_value, key_of(value).to(tl.int64), by_key)
    return tl.minimum(tl.maximum(pivots, low + 1), high - 1).to(tl.int32)


@triton.jit
def _proved(maxima, k):  # type: ignore[no-untyped-def]
    """The k-th highest of the chunks' maxima, as a key: at least k tokens are not below it; LOWEST if there is none."""
    keys = key_of(maxima)
    lo = tl.full((), LOWEST, tl.int32).to(tl.int64)
    hi = tl.max(keys).to(tl.int64) + 1
    while hi > lo + 1:
        middle = (lo + hi) >> 1
        enough = tl.sum((keys.to(tl.int64) >= middle).to(tl.int32)) >= k
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle)
    return lo.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def find_floor(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stats_ptr,
    sums_ptr,
    places_ptr,
    few_ptr,
    out_ptr,
    V,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    KNOWN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program s: the floor of row s; -inf where nothing is asked. With KNOWN only where out has NaN.

    places: int32 [S, TILES], for lists of tiles; few: float32 [S, TILE], for the logits in [lo, hi) once they fit: then
    they stay in registers.

    logits [S, V] with a row stride; stats and sums float32 [S, CHUNKS]; out float32 [S]. A parameter without a
    pointer is asked of no row.
    """
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if KNOWN:
        known = tl.load(out_ptr + row)
        if known == known:
            return
    row_ptr = logits_ptr + row * stride
    places_ptr += row * TILES
    few_ptr += row * TILE
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int64) if top_k_ptr is not None else tl.full((), 0, tl.int64)
    top_p = tl.load(top_p_ptr + row) if top_p_ptr is not None else tl.full((), 1.0, tl.float32)
    min_p = tl.load(min_p_ptr + row) if min_p_ptr is not None else tl.full((), 0.0, tl.float32)
    index = tl.arange(0, CHUNKS)
    real = index < num_chunks
    maxima = tl.load(stats_ptr + row * CHUNKS + index, mask=real, other=float("-inf"))
    top = tl.max(maxima)
    floor = float("-inf")
    if (temperature > 0) & (top > float("-inf")) & (top < float("inf")):
        scale = LOG2_E / temperature
        if min_p > 0:
            floor = top + temperature * tl.log(min_p)
        ranked = (top_k > 0) & (top_k < V)
        if ranked | (top_p < 1):
            nested = tl.arange(0, TILES)[:, None] * (TILE // CHUNK) + tl.arange(0, TILE // CHUNK)[None, :]
            tile_tops = tl.max(
                tl.load(stats_ptr + row * CHUNKS + nested, mask=nested < num_chunks, other=float("-inf")), 1
            )
            sums = tl.load(sums_ptr + row * CHUNKS + index, mask=real, other=0.0)
            total = tl.sum(weights(maxima, top, scale).to(tl.float64) * sums.to(tl.float64))
            # what all tokens could weigh together below this is less than what top_p may leave out
            rest = (1.0 - top_p) * total.to(tl.float32)
            bound = tl.maximum(key_of(top - temperature * (tl.log(V / rest) * 1.001 + 0.01)), LOWEST)
            spread = tl.maximum((top - tl.min(tl.where(maxima > float("-inf"), maxima, top))) * 0.5, temperature * 0.01)
            end = key_of(top) + 1
            # first the rank's border, then the mass of its tokens, then the border of top_p
            ranking, measuring = ranked, ranked & False
            lo, hi, step = bound, end, 0
            target, above = top_p.to(tl.float64) * total, tl.full((), 0.0, tl.float64)
            # what lies at or above lo, at most; a guess where the rank begins: the chunks prove little more than it
            below = total
            if ranked:
                lo, target = _proved(maxima, top_k), top_k.to(tl.float64)
                below = tl.where(lo > LOWEST, top_k * 4, V).to(tl.float64)
            few = tl.full([1, TILE], float("-inf"), tl.float32)
            fits, base = ranked & False, tl.full((), 0.0, tl.float64)
            searching = (hi > lo + 1) | ranking
            while searching:
                if measuring | (hi <= lo + 1):
                    pivots = tl.full([PIVOTS, 1], 0, tl.int32) + (lo + 1)
                else:
                    pivots = _choose_pivots(lo, hi, top, spread, step, PIVOTS)
                if (not fits) & (not measuring) & (hi > lo + 1):
                    # the rank's tokens are needed with all above them, their mass comes next; else only [lo, hi)
                    lightest = tl.where(ranking, 1.0, weights(value_of(lo), top, scale)).to(tl.float64)
                    if below - tl.where(ranking, 0.0, above) <= lightest * TILE:
                        until = tl.where(ranking, NO_KEY, hi)
                        found = _gather(row_ptr, places_ptr, tile_tops, lo, until, few_ptr, V, TILE, TILES)
                        fits = found <= TILE
                        if fits:
                            base = tl.where(ranking, 0.0, above)
                            lane = tl.arange(0, TILE)[None, :]
                            few = tl.load(few_ptr + lane, mask=lane < found, other=float("-inf"))
                        else:
                            below = tl.full((), 1e30, tl.float64)
                if fits:
                    key = key_of(few)
                    weight = tl.where(ranking, 1.0, weights(few, top, scale))
                    reached = base + tl.sum(tl.where(key >= pivots, weight, 0.0).to(tl.float64), 1)
                    low = tl.min(tl.where((key >= lo) & (key > LOWEST), key, NO_KEY))
                    high = tl.max(tl.where(key < hi, key, LOWEST))
                else:
                    reached, low, high = _pass(
                        row_ptr, places_ptr, tile_tops, top, scale, lo, hi, pivots, not ranking, V, TILE, TILES, PIVOTS
                    )
                step += 1
                if measuring:
                    # of equals at the rank's border only as many as are left
                    left = top_k.to(tl.float64) - above
                    mass = tl.max(reached) + left * weights(value_of(lo), top, scale).to(tl.float64)
                    target = top_p.to(tl.float64) * mass
                    above, below = tl.full((), 0.0, tl.float64), mass
                    measuring = ranked & False
                else:
                    at = tl.reshape(pivots, [PIVOTS])
                    enough = reached >= target
                    above = tl.maximum(above, tl.max(tl.where(enough, 0.0, reached)))
                    below = tl.minimum(below, tl.min(tl.where(enough, reached, below)))
                    hi = tl.minimum(tl.min(tl.where(enough, hi, at)), high + 1)
                    lo = tl.maximum(lo, tl.max(tl.where(enough & (at < hi), at, lo)))
                    if lo > LOWEST:
                        lo = tl.maximum(lo, tl.minimum(low, hi - 1))
                searching = measuring | (hi > lo + 1)
                if ranking & (not searching):
                    floor = tl.maximum(floor, value_of(lo))
                    ranking = ranked & False
                    step = 0
                    hi = end
                    if top_p < 1:
                        searching = ranked
                        measuring = lo > LOWEST
                        if lo == LOWEST:
                            # fewer finite logits than the rank: it bars none of them
                            lo = bound
                            target = top_p.to(tl.float64) * total
                            above, below = tl.full((), 0.0, tl.float64), total
            floor = tl.maximum(floor, value_of(lo))
    tl.store(out_ptr + row, floor)


def floors(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """float32 [S]. logits: [S, V], each row contiguous; temperature, top_p (1: none), min_p (0: none): float32 [S];
    top_k (0: none): int64 [S]. Few rows of 16 bits are counted first, if all three limits are given."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return out
    launch = options(device)
    stats, sums = run_stats(logits, temperature, launch)
    counted = False
    short = num_rows <= COUNTED_ROWS and logits.element_size() == 2
    if short and top_k is not None and top_p is not None and min_p is not None:
        borders(logits, (temperature, top_k, top_p, min_p), stats, sums, out)
        counted = True
    chunks = stats.shape[1]
    tile = max(TILE, CHUNK)
    tiles = max(LEAST_TILES, triton.next_power_of_2(-(-vocab_size // tile)))
    places = torch.empty((num_rows, tiles), dtype=torch.int32, device=device)
    few = torch.empty((num_rows, tile), dtype=torch.float32, device=device)
    find_floor[(num_rows,)](
        logits, logits.stride(0) if num_rows > 1 else vocab_size, temperature, top_k, top_p, min_p, stats, sums,
        places, few, out, vocab_size, -(-vocab_size // CHUNK), CHUNK, chunks, tile, tiles, PIVOTS, counted,
        num_warps=WARPS if num_rows > FEW_ROWS else FEW_WARPS, **launch,
    )  # fmt: skip
    return out


def aot_cases(
    name: str, dtype: str, *, top_k: bool, top_p: bool, min_p: bool, known: bool = False
) -> tuple[AotCase, ...]:
    """Over the vocabulary of Qwen3 or Llama 3. `known`: what was counted is left out, where rows are few."""
    signature: dict[str, Constant] = {
        "logits_ptr": f"*{dtype}:16",
        "stride": "i32:16",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i64" if top_k else None,
        "top_p_ptr": "*fp32" if top_p else None,
        "min_p_ptr": "*fp32" if min_p else None,
        "stats_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "places_ptr": "*i32",
        "few_ptr": "*fp32",
        "out_ptr": "*fp32",
        "V": "i32:16",
        "num_chunks": "i32",
        "CHUNK": CHUNK,
        "CHUNKS": LEAST_CHUNKS,
        "TILE": TILE,
        "TILES": LEAST_TILES,
        "PIVOTS": PIVOTS,
        "PDL": False,
    }
    searches = {"search": WARPS, "search_few": FEW_WARPS}
    cases = (
        AotCase(
            f"{name}_{how}", find_floor, signature | {"KNOWN": known and warps == FEW_WARPS}, num_warps=warps, hot=False
        )
        for how, warps in searches.items()
    )
    return (*aot_stats(name, dtype), *cases)

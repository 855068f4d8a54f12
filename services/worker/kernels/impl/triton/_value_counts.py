"""The lowest logit that top-k, top-p and min-p keep, where logits have 16 bits: by counting, in three short launches.

A number of 16 bits has few values near the top of a row, so each value is counted: BINS of them, from the row's maximum
down. Rank and mass of a border are sums over these counts, exact and the same in any order. For few rows: an H200 takes
26 us for one, where a program's search takes 67 to 287, but as long as that for 16. Rows whose border lies further down
(a nearly even distribution around zero) are left to the search of `_floors`, a launch that ends at once where nothing
is left.

Shapes: S rows, V tokens, tiles of TILE tokens. Values compare as their keys, as in `_floors`, of 16 bits here.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, processors, release, wait
from services.worker.kernels.impl.triton._sampling import CHUNK, LEAST_CHUNKS, LOG2_E, SINGLES, weights

BINS = 2048  # 16 powers of two of bf16, two of fp16
TILE = 4096
PROGRAMS = 4  # per processor


@triton.jit
def _key_of(x):  # type: ignore[no-untyped-def]
    """int32 that orders as 16-bit floats do."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _value_of(key, like_ptr):  # type: ignore[no-untyped-def]
    """The inverse of `_key_of`, as float32."""
    bits = key ^ ((key >> 31) & 0x7FFF)
    return bits.to(tl.int16).to(like_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def count_values(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    stats_ptr,
    counts_ptr,
    V,
    num_chunks,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (S, programs of a row). counts: int32 [S, BINS], zero before; of a row without a finite maximum it stays."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index, bins, lane = tl.arange(0, CHUNKS), tl.arange(0, BINS), tl.arange(0, TILE)
    top = tl.max(tl.load(stats_ptr + row * CHUNKS + index, mask=index < num_chunks, other=float("-inf")))
    if (top > float("-inf")) & (top < float("inf")):
        highest = _key_of(top.to(logits_ptr.dtype.element_ty))
        counts = tl.zeros([BINS], tl.int32)
        for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
            x = tl.load(logits_ptr + row * stride + start + lane, mask=start + lane < V, other=float("-inf"))
            below = highest - _key_of(x)
            # neither NaN nor what is barred
            counted = (x.to(tl.float32) > float("-inf")) & (below >= 0) & (below < BINS)
            counts += tl.histogram(tl.where(counted, below, 0), BINS, mask=counted)
        tl.atomic_add(counts_ptr + row * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def find_borders(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stats_ptr,
    sums_ptr,
    counts_ptr,
    out_ptr,
    V,
    num_chunks,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program s: the floor of row s, as `_floors.find_floor`; NaN where the counts do not reach down to it."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    top_k, min_p = tl.load(top_k_ptr + row), tl.load(min_p_ptr + row)
    index, bins = tl.arange(0, CHUNKS), tl.arange(0, BINS)
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
            values = _value_of(_key_of(top.to(logits_ptr.dtype.element_ty)) - bins, logits_ptr)
            counts = tl.load(counts_ptr + row * BINS + bins)
            # where there is none the value may be none either
            weight = tl.where(counts > 0, weights(values, top, scale), 0.0).to(tl.float64)
            reached = tl.cumsum(counts.to(tl.float64) * weight)
            border = 0
            known = ranked | True
            if ranked:
                ranks = tl.cumsum(counts)
                border = tl.min(tl.where(ranks.to(tl.int64) >= top_k, bins, BINS))
                known = border < BINS
                here = bins == border
                # of equals at the rank's border only as many as are left
                left = top_k.to(tl.float64) - tl.sum(tl.where(here, ranks - counts, 0)).to(tl.float64)
                mass = tl.sum(tl.where(here, reached - counts.to(tl.float64) * weight + left * weight, 0.0))
            else:
                sums = tl.load(sums_ptr + row * CHUNKS + index, mask=real, other=0.0)
                mass = tl.sum(weights(maxima, top, scale).to(tl.float64) * sums.to(tl.float64))
            if top_p < 1:
                enough = tl.min(tl.where(reached >= top_p.to(tl.float64) * mass, bins, BINS))
                known &= enough < BINS
                border = enough
            found = tl.sum(tl.where(bins == border, values, 0.0))
            floor = tl.where(known, tl.maximum(floor, found), float("nan"))
    tl.store(out_ptr + row, floor)


def borders(
    logits: Tensor, limits: tuple[Tensor, Tensor, Tensor, Tensor], stats: Tensor, sums: Tensor, out: Tensor
) -> None:
    """out: float32 [S], each row's floor or NaN. logits: 16 bits [S, V], each row contiguous; limits: temperature,
    top_k, top_p, min_p as in the op keep_floor; stats, sums: of chunk_stats."""
    num_rows, vocab_size = logits.shape
    chunks, num_chunks, launch = stats.shape[1], -(-vocab_size // CHUNK), options(logits.device)
    parts = _parts(logits.device, num_rows, vocab_size)
    counts = torch.zeros((num_rows, BINS), dtype=torch.int32, device=logits.device)
    count_values[(num_rows, parts)](
        logits, logits.stride(0) if num_rows > 1 else vocab_size, stats, counts, vocab_size, num_chunks,
        CHUNKS=chunks, TILE=TILE, BINS=BINS, num_warps=8, **launch,
    )  # fmt: skip
    find_borders[(num_rows,)](
        logits, *limits, stats, sums, counts, out, vocab_size, num_chunks,
        CHUNKS=chunks, BINS=BINS, num_warps=8, **launch,
    )  # fmt: skip


@cache
def _parts(device: torch.device, num_rows: int, vocab_size: int) -> int:
    """Programs of a row: none has less than a tile, and together they fill the chip."""
    return min(-(-vocab_size // TILE), max(1, PROGRAMS * processors(device) // num_rows))


def aot_cases(dtype: str) -> tuple[AotCase, ...]:
    signature: dict[str, Constant] = {
        "logits_ptr": f"*{dtype}:16",
        "stride": "i32:16",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i64",
        "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "counts_ptr": "*i32:16",
        "out_ptr": "*fp32",
        "V": "i32:16",
        "num_chunks": "i32",
        "CHUNKS": LEAST_CHUNKS,
        "TILE": TILE,
        "BINS": BINS,
        "PDL": False,
    }
    return tuple(
        AotCase(name, kernel, {key: signature[key] for key in kernel.arg_names}, num_warps=8, hot=False)
        for name, kernel in (("count_values", count_values), ("find_borders", find_borders))
    )

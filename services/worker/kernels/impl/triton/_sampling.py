"""From logits to one token per row in two launches, shared by draw, argmax and sample; the first also serves floors.

Shapes: S rows, V tokens, chunks of CHUNK tokens, C chunks of a row. `chunk_stats` reads the logits once and leaves each
chunk's maximum and its sum of exp((logit - maximum) / temperature); `pick` combines a row's chunks in float64 (a few
hundred numbers), finds the chunk in which the token lies, and reads only that one again. Sums are per chunk, so a row's
token does not depend on the other rows. NaN counts as -inf, and no logits lead to an id outside the vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait

CHUNK = 1024
MANY_ROWS = 32  # from here on a program takes several chunks: there are programs enough
PER_PROGRAM = 4
PICK_WARPS = 4
LEAST_CHUNKS = 256  # so that the vocabularies of today share a compiled kernel

# read one number at a time: parts of larger uploads may be anywhere, and no place of theirs may cost a new compile
SINGLES = (
    *("temperature_ptr", "floor_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"),
    *("stats_ptr", "sums_ptr", "places_ptr", "few_ptr", "out_ptr", "counter_ptr"),
    *("index_ptr", "slots_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr"),
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(state):  # type: ignore[no-untyped-def]
    """The finalizer of splitmix64 on int64, whose products wrap."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """The number of `ops.sample.uniform`: float64 in [0, 1)."""
    golden = -0x61C8864680B583EB
    mixed = _mix(_mix(seed + golden) + (position + 1) * golden)
    return ((mixed >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def load_logits(ptr, mask):  # type: ignore[no-untyped-def]
    """float32; NaN and what is masked as -inf."""
    x = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def weights(x, top, scale):  # type: ignore[no-untyped-def]
    """2^((x - top) * scale); where top is -inf there is nothing but -inf, which weighs nothing."""
    return tl.exp2((x - tl.where(top > float("-inf"), top, 0.0)) * scale)


@triton.jit
def _pick_row(  # type: ignore[no-untyped-def]
    row,
    logits_ptr,
    stride,
    temperature_ptr,
    floor_ptr,
    seeds_ptr,
    positions_ptr,
    stats_ptr,
    sums_ptr,
    out_ptr,
    V,
    num_chunks,
    GREEDY: tl.constexpr,
    FLOOR: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    index = tl.arange(0, CHUNKS)
    stat = row * CHUNKS + index
    # past L1: in the fused form other programs of this launch have just written them
    maxima = tl.load(stats_ptr + stat, mask=index < num_chunks, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(maxima)
    # greedy first; it also stands in where there is nothing to draw from (all -inf, or an infinity)
    chunk = tl.min(tl.where(maxima == top, index, CHUNKS))
    chunk = tl.minimum(chunk, num_chunks - 1)
    drawing = False
    scale = 1.0
    local = tl.full((), 0.0, tl.float64)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            scale = LOG2_E / temperature
            sums = tl.load(sums_ptr + stat, mask=index < num_chunks, other=0.0, cache_modifier=".cg")
            factor = weights(maxima, top, scale)
            mass = factor.to(tl.float64) * sums.to(tl.float64)
            cumulated = tl.cumsum(mass)
            total = tl.sum(mass)
            if (total > 0) & (total < float("inf")):
                drawing = True
                target = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) * total
                # the first possible chunk beyond the target, or the last possible one where rounding leaves none
                beyond = tl.min(tl.where((cumulated > target) & (mass > 0), index, CHUNKS))
                last = tl.max(tl.where(mass > 0, index, 0))
                chunk = tl.minimum(beyond, last)
                here = index == chunk
                before = tl.sum(tl.where(here, cumulated - mass, 0.0))
                local = (target - before) / tl.sum(tl.where(here, factor, 0.0)).to(tl.float64)
    lane = tl.arange(0, CHUNK)
    offset = chunk * CHUNK + lane
    x = load_logits(logits_ptr + row * stride + offset, offset < V)
    chunk_top = tl.max(x)
    place = tl.min(tl.where(x == chunk_top, lane, CHUNK))
    if drawing:
        w = weights(x, chunk_top, scale)
        if FLOOR:
            w = tl.where(x >= tl.load(floor_ptr + row), w, 0.0)
        inside = tl.cumsum(w.to(tl.float64))
        beyond = tl.min(tl.where((inside > local) & (w > 0), lane, CHUNK))
        place = tl.minimum(beyond, tl.max(tl.where(w > 0, lane, 0)))
    tl.store(out_ptr + row, tl.minimum(chunk * CHUNK + place, V - 1).to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def chunk_stats(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    temperature_ptr,
    floor_ptr,
    seeds_ptr,
    positions_ptr,
    stats_ptr,
    sums_ptr,
    out_ptr,
    counter_ptr,
    V,
    num_chunks,
    GREEDY: tl.constexpr,
    FLOOR: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, s): chunks p * PER .. of row s. logits [S, V] with a row stride, maxima and sums float32 [S, CHUNKS].

    FUSED: the row's last program also does `pick`'s work; counter int32 [S] is zero before and after.
    """
    release(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * PER + tl.arange(0, PER)
    offset = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    wait(PDL)
    x = load_logits(logits_ptr + row * stride + offset, offset < V)
    top = tl.max(x, 1)
    stat = row * CHUNKS + chunk
    tl.store(stats_ptr + stat, top, mask=chunk < num_chunks)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            w = weights(x, top[:, None], LOG2_E / temperature)
            if FLOOR:
                w = tl.where(x >= tl.load(floor_ptr + row), w, 0.0)
            tl.store(sums_ptr + stat, tl.sum(w, 1), mask=chunk < num_chunks)
    if FUSED:
        tl.debug_barrier()  # all of this program's stores are before the count
        arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(counter_ptr + row, 0)
            _pick_row(
                row,
                logits_ptr,
                stride,
                temperature_ptr,
                floor_ptr,
                seeds_ptr,
                positions_ptr,
                stats_ptr,
                sums_ptr,
                out_ptr,
                V,
                num_chunks,
                GREEDY,
                FLOOR,
                CHUNK,
                CHUNKS,
            )


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def pick(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    temperature_ptr,
    floor_ptr,
    seeds_ptr,
    positions_ptr,
    stats_ptr,
    sums_ptr,
    out_ptr,
    V,
    num_chunks,
    GREEDY: tl.constexpr,
    FLOOR: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program s: the token of row s, from what `chunk_stats` has left. out: int32 [S]."""
    release(PDL)
    wait(PDL)
    _pick_row(
        tl.program_id(0).to(tl.int64),
        logits_ptr,
        stride,
        temperature_ptr,
        floor_ptr,
        seeds_ptr,
        positions_ptr,
        stats_ptr,
        sums_ptr,
        out_ptr,
        V,
        num_chunks,
        GREEDY,
        FLOOR,
        CHUNK,
        CHUNKS,
    )


def run_stats(logits: Tensor, temperature: Tensor, launch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Each chunk's maximum and sum of exp((logit - maximum) / temperature), float32 [S, C up to a power of 2]."""
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    chunks = max(LEAST_CHUNKS, triton.next_power_of_2(num_chunks))
    maxima, sums = torch.empty((2, num_rows, chunks), dtype=torch.float32, device=logits.device).unbind(0)
    per = PER_PROGRAM if num_rows >= MANY_ROWS else 1
    stride = logits.stride(0) if num_rows > 1 else vocab_size
    chunk_stats[(-(-num_chunks // per), num_rows)](
        logits, stride, temperature, None, None, None, maxima, sums, None, None, vocab_size, num_chunks,
        False, False, CHUNK, chunks, per, False, num_warps=4, **launch,
    )  # fmt: skip
    return maxima, sums


def tokens(
    logits: Tensor,
    temperature: Tensor | None,
    floor: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    counter: Tensor | None = None,
) -> Tensor:
    """int32 [S]: greedy without a temperature, else a draw. logits: [S, V], each row contiguous.

    counter: int32 [S] of zeros, for the form with one launch; two launches of it must not overlap.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int32, device=device)
    if not num_rows:
        return out
    num_chunks = -(-vocab_size // CHUNK)
    per = PER_PROGRAM if num_rows >= MANY_ROWS else 1
    chunks = max(LEAST_CHUNKS, triton.next_power_of_2(num_chunks))
    maxima, sums = torch.empty((2, num_rows, chunks), dtype=torch.float32, device=device).unbind(0)
    greedy = temperature is None
    launch = options(device)
    stride = logits.stride(0) if num_rows > 1 else vocab_size
    fused = counter is not None
    chunk_stats[(-(-num_chunks // per), num_rows)](
        logits, stride, temperature, floor, seeds, positions, maxima, sums, out, counter, vocab_size, num_chunks,
        greedy, floor is not None, CHUNK, chunks, per, fused, num_warps=4, **launch,
    )  # fmt: skip
    if not fused:
        pick[(num_rows,)](
            logits, stride, temperature, floor, seeds, positions, maxima, sums, out, vocab_size, num_chunks,
            greedy, floor is not None, CHUNK, chunks, num_warps=PICK_WARPS, **launch,
        )  # fmt: skip
    return out


def aot_cases(name: str, dtype: str, *, greedy: bool, floor: bool, hot: bool) -> tuple[AotCase, ...]:
    """Both launches, for few rows and for many."""
    shared: dict[str, Constant] = {
        "logits_ptr": f"*{dtype}:16",
        "stride": "i32:16",
        "temperature_ptr": None if greedy else "*fp32",
        "floor_ptr": "*fp32" if floor else None,
        "seeds_ptr": None if greedy else "*i64",
        "positions_ptr": None if greedy else "*i64",
        "stats_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "out_ptr": "*i32",
        "V": "i32:16",
        "num_chunks": "i32",
        "GREEDY": greedy,
        "FLOOR": floor,
        "CHUNK": CHUNK,
        "CHUNKS": LEAST_CHUNKS,
        "PDL": False,
    }
    stats = {**shared, "counter_ptr": None, "FUSED": False}
    return (
        AotCase(f"{name}_stats", chunk_stats, {**stats, "PER": 1}, hot=hot),
        AotCase(f"{name}_stats_many", chunk_stats, {**stats, "PER": PER_PROGRAM}, hot=hot),
        AotCase(f"{name}_pick", pick, shared, num_warps=PICK_WARPS, hot=hot),
        AotCase(f"{name}_fused", chunk_stats, {**stats, "counter_ptr": "*i32", "FUSED": True, "PER": 1}, hot=hot),
    )


def aot_stats(name: str, dtype: str) -> tuple[AotCase, ...]:
    """The first launch alone, as floors need it."""
    cases = aot_cases(name, dtype, greedy=False, floor=False, hot=False)[:2]
    nothing = {"seeds_ptr": None, "positions_ptr": None, "out_ptr": None}
    return tuple(case._replace(signature={**case.signature, **nothing}) for case in cases)

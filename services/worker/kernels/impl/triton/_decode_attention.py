"""Attention of decode rows, one token each, over their pages. `decode` is the one entry.

A program reads one part of one row's context for one KV head, and all query heads that share it. Parts are dealt on the
device from the rows' true lengths: the grid has a place for each row and `spare` more, and the longest rows are cut so
that these suffice; short rows, and full chips, have one part and no second pass. Of a row in several parts each leaves
float32 sums, and the last to arrive joins them (FUSED), or a second kernel does: so on AMD, whose barrier does not wait
for other waves' stores. Softmax is online, in base 2.

Few rows have a kernel of their own.
"""

from functools import cache
from math import log2
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._few_attention import POINTERS, cut, few_kernel, finish, join
from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.tuned import table

LOG2E = 1.4426950408889634
MOST_PARTS = 64  # places beside the rows; joining more takes longer than it saves
JOINED = 8192  # numbers that a program joins at once
JOINED_OF_FEW = 16384  # likewise, with four warps or more: what is joined in one turn waits once
ROW_BUCKETS = (16, 64, 256, 512, 1024, 4096)  # compiled for
INTEGERS = ["num_rows", "spare", "table_stride"]  # vary from step to step: never compiled for


class Shape(NamedTuple):
    """How the work is laid out. `waves`: places for dealt parts, in programs per processor."""

    block_kv: int
    num_warps: int
    num_stages: int
    waves: float
    fused: bool = True
    parts: int = 0  # of every row at most, by few_kernel, instead of `waves`; 0: dealt


@triton.jit
def _deal(  # type: ignore[no-untyped-def]
    context_ptr, place, num_rows, spare, BLOCK_KV: tl.constexpr, WINDOW: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Of this place: its row (num_rows or more: none), the row's first place, and the row's parts."""
    ids = tl.arange(0, BLOCK_R)
    lengths = tl.load(context_ptr + ids, mask=ids < num_rows, other=0)
    blocks = tl.cdiv(lengths, BLOCK_KV)
    if WINDOW > 0:
        blocks -= tl.maximum(lengths - WINDOW, 0) // BLOCK_KV
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0), spare), 1)
    # together at most num_rows + spare
    parts = tl.where(ids < num_rows, tl.maximum(tl.cdiv(blocks, share), 1), 0)
    ends = tl.cumsum(parts, 0)
    before = ends <= place
    row = tl.sum(before.to(tl.int32), 0)
    return row, tl.sum(tl.where(before, parts, 0), 0), tl.sum(tl.where(ids == row, parts, 0), 0)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D], contiguous
    k_ptr,  # [blocks, PAGE, NUM_KV_HEADS, HEAD_DIM], contiguous
    v_ptr,  # like k
    context_ptr,  # int32 [R]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [R] or None
    sinks_ptr,  # float32 [H] or None
    k_scale_ptr,  # float32 [1] or None
    v_scale_ptr,
    sums_ptr,  # for join, the peaks behind them
    arrived_ptr,  # int32 [R, NUM_KV_HEADS], zero, and zero again at the end
    factor,  # float32: from a product to its logit in base 2; with SOFTCAP, to twice the argument of tanh
    num_rows,
    spare,
    table_stride,
    q_stride_t,
    q_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # in base 2
    BLOCK_M: tl.constexpr,  # SHARE, padded for the matrix units
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, place = tl.program_id(0), tl.program_id(1)
    heads, dims, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KV)
    inside = dims < HEAD_DIM
    mask = (heads < SHARE)[:, None] & inside[None, :]
    own = tl.where(heads < SHARE, heads, 0)
    release(PDL)
    wait(PDL)
    row, first, count = _deal(context_ptr, place, num_rows, spare, BLOCK_KV, WINDOW, BLOCK_R)
    if row >= num_rows:
        return
    length = tl.load(context_ptr + row)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    table_ptr = tables_ptr + table_row.to(tl.int64) * table_stride
    q_ptr += row.to(tl.int64) * q_stride_t + (kv_head * SHARE + own[:, None]) * q_stride_h
    q = tl.load(q_ptr + dims[None, :], mask=inside[None, :], other=0.0)
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr)
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin, blocks = low // BLOCK_KV, tl.cdiv(length, BLOCK_KV)
    blocks -= begin
    part = place - first
    stop = (begin + blocks * (part + 1) // count) * BLOCK_KV
    begin = (begin + blocks * part // count) * BLOCK_KV
    end = tl.minimum(stop, length)

    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)  # summed up once, at the end
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # page numbers are read one turn ahead, so that keys do not wait for them; the first or last token stands in for
    # those outside
    first_seen, last_seen = tl.maximum(low, begin), tl.maximum(end - 1, 0)
    if PAGE % BLOCK_KV == 0:
        pages = tl.load(table_ptr + begin // PAGE)
    else:
        pages = tl.load(table_ptr + tl.maximum(tl.minimum(begin + tokens, last_seen), first_seen) // PAGE)
    for start in range(begin, end, BLOCK_KV):
        position = tl.minimum(start + tokens, last_seen)
        if WINDOW > 0:
            position = tl.maximum(position, first_seen)
        slots = pages.to(tl.int64) * PAGE + position % PAGE
        offsets = (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
        if PAGE % BLOCK_KV == 0:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV, last_seen) // PAGE)
        else:
            pages = tl.load(table_ptr + tl.minimum(start + BLOCK_KV + tokens, last_seen) // PAGE)
        if BLOCK_D == HEAD_DIM:
            k, v = tl.load(k_ptr + offsets), tl.load(v_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * factor
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)
        seen = start + tokens < end
        if WINDOW > 0:
            seen &= start + tokens >= low
        scores = tl.where(seen[None, :], scores, -1.0e30)
        higher = tl.maximum(peak, tl.max(scores, 1))
        lowered = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        totals = totals * lowered[:, None] + weights
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * lowered[:, None], input_precision="ieee")
        peak = higher
    total = tl.sum(totals, 1)

    out_ptr += (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * SHARE * HEAD_DIM
    peaks_ptr = sums_ptr + (num_rows + spare) * (NUM_KV_HEADS * SHARE * HEAD_DIM)
    if count == 1:
        sinks_at = sinks_ptr
        if sinks_ptr is not None:
            sinks_at += kv_head * SHARE
        finish(acc, peak, total, out_ptr + own[:, None] * HEAD_DIM, sinks_at, v_scale_ptr, own, dims, mask)
    else:
        at = (place * NUM_KV_HEADS + kv_head) * SHARE
        tl.store(sums_ptr + (at + own)[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + own, peak, mask=heads < SHARE, cache_modifier=".cg")
        tl.store(peaks_ptr + 2 * at + SHARE + own, total, mask=heads < SHARE, cache_modifier=".cg")
        if FUSED:
            # all threads have stored before one of them says so
            tl.debug_barrier()
            arrived_ptr += row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == count - 1:
                join(
                    sums_ptr, peaks_ptr, out_ptr, sinks_ptr, v_scale_ptr, first, count, kv_head,
                    NUM_KV_HEADS, SHARE, HEAD_DIM, SHARE_PADDED, BLOCK_D, TOGETHER,
                )  # fmt: skip
                tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def join_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    context_ptr,
    sinks_ptr,
    v_scale_ptr,
    sums_ptr,
    num_rows,
    spare,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """As the end of decode_kernel without FUSED; a program a KV head and place, of which those of first parts work.

    FEW: as the end of few_kernel; a program a KV head and row.
    """
    kv_head, place = tl.program_id(0), tl.program_id(1)
    release(PDL)
    wait(PDL)
    if FEW:
        row, parts = place, spare // num_rows + 1
        place *= parts
        first = place
        _, _, _, count = cut(tl.load(context_ptr + row), parts, BLOCK_KV, WINDOW)
    else:
        row, first, count = _deal(context_ptr, place, num_rows, spare, BLOCK_KV, WINDOW, BLOCK_R)
    if (row < num_rows) & (place == first) & (count > 1):
        out_ptr += (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * SHARE * HEAD_DIM
        peaks_ptr = sums_ptr + (num_rows + spare) * (NUM_KV_HEADS * SHARE * HEAD_DIM)
        join(
            sums_ptr, peaks_ptr, out_ptr, sinks_ptr, v_scale_ptr, first, count, kv_head,
            NUM_KV_HEADS, SHARE, HEAD_DIM, SHARE_PADDED, BLOCK_D, TOGETHER,
        )  # fmt: skip


class Plan(NamedTuple):
    """What a launch needs beyond its tensors."""

    grid: tuple[int, ...]
    spare: int
    is_few: bool
    scratch: tuple[int, int, int]
    factor: float
    decode: dict[str, Any]  # keyword arguments
    join: dict[str, Any] | None  # None: fused
    join_grid: tuple[int, int]


def decode(q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> None:
    """Writes out[:num_decode]. q, out: [T, H, D]; caches: [blocks, B, K, D], contiguous."""
    launch(q, out, k_cache, v_cache, rows, spec, None)


def launch(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    spec: AttentionSpec,
    shape: Shape | None,
) -> None:
    """As `decode`; None: the shape that `choose` gives."""
    device, num_rows, tables = q.device, rows.num_decode, rows.block_tables
    plan = _plan(
        device, q.dtype, k_cache.dtype, q.shape[1:], k_cache.shape[2], rows.block_tokens, num_rows, spec[:3], shape
    )
    sums = torch.empty(plan.scratch, dtype=torch.float32, device=device)
    k_scale, v_scale = spec.kv_scale or (None, None)
    kernel = few_kernel if plan.is_few else decode_kernel
    kernel[plan.grid](
        q, out, k_cache, v_cache, rows.context_lens, tables, rows.table_rows, spec.sinks, k_scale, v_scale,
        sums, None if plan.join else _arrivals(device), plan.factor,
        *(() if plan.is_few else (num_rows, plan.spare)), tables.stride(0), q.stride(0), q.stride(1), **plan.decode,
    )  # fmt: skip
    if plan.join:
        rest = (sums, num_rows, plan.spare)
        join_kernel[plan.join_grid](out, rows.context_lens, spec.sinks, v_scale, *rest, **plan.join)


@cache
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: tuple[int, int],  # of queries: their number and size
    num_kv_heads: int,
    page: int,
    num_rows: int,
    numbers: tuple[float, int, float],  # of the spec: scale, window, softcap
    shape: Shape | None,
) -> Plan:
    (num_heads, head_dim), (scale, window, softcap) = heads, numbers
    if shape is None:
        shape = choose(device, dtype, kv_dtype, num_rows, num_heads // num_kv_heads, num_kv_heads, head_dim)
    is_few = shape.parts > 0
    spare = num_rows * (shape.parts - 1) if is_few else places(device, num_kv_heads, shape.waves)
    common = {**_sizes(num_heads, num_kv_heads, head_dim, shape, num_rows), "WINDOW": window}
    common |= options(device)
    joined = {**common, "FEW": is_few, "num_warps": 4}
    if is_few:
        del common["BLOCK_R"]
    return Plan(
        grid=(num_kv_heads, shape.parts, num_rows) if is_few else (num_kv_heads, num_rows + spare),
        spare=spare,
        is_few=is_few,
        scratch=(num_rows + spare, num_heads, head_dim + 2),
        factor=2 * LOG2E * scale / softcap if softcap else scale * LOG2E,
        decode={
            **common,
            "PAGE": page,
            "SOFTCAP": softcap * LOG2E,
            "BLOCK_M": _padded_share(num_heads, num_kv_heads),
            "FUSED": shape.fused,
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
        },
        join=None if shape.fused else joined,
        join_grid=(num_kv_heads, num_rows if is_few else num_rows + spare),
    )


def _sizes(num_heads: int, num_kv_heads: int, head_dim: int, shape: Shape, num_rows: int) -> dict[str, int]:
    """Constants of all kernels."""
    joined = min(JOINED_OF_FEW, 4096 * shape.num_warps) if shape.parts else JOINED
    share = num_heads // num_kv_heads
    share_padded, block_d = triton.next_power_of_2(share), max(16, triton.next_power_of_2(head_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "SHARE": share,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_KV": shape.block_kv,
        "BLOCK_R": next((b for b in ROW_BUCKETS if num_rows <= b), triton.next_power_of_2(num_rows)),
        "SHARE_PADDED": share_padded,
        "TOGETHER": max(1, joined // (share_padded * block_d)),
    }


def _padded_share(num_heads: int, num_kv_heads: int) -> int:
    return max(16, int(triton.next_power_of_2(num_heads // num_kv_heads)))


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of one launch after the other, which leave them at zero. Made in the first step, before any capture."""
    return torch.zeros(1 << 18, dtype=torch.int32, device=device)


def places(device: torch.device, num_kv_heads: int, waves: float) -> int:
    """How many parts there may be more than rows."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(MOST_PARTS, round(waves * processors / num_kv_heads)))


def choose(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_rows: int,
    share: int,
    num_kv_heads: int,
    head_dim: int,
) -> Shape:
    """From the nearest row of this GPU's table for the head size and the cache's width, else a sane one."""
    shape = default_shape(dtype.itemsize, kv_dtype.itemsize, head_dim, small_lds(device))
    if dtype.itemsize != 2:
        return shape
    fitting = [
        entry
        for entry in table("paged_attention", device)
        if entry["head_dim"] == head_dim and entry["kv_bytes"] == kv_dtype.itemsize
    ]
    if not fitting:
        return shape

    def distance(entry: Any) -> float:
        """KV heads and query heads per KV head tell kernels apart; rows choose among one's entries."""
        heads = abs(log2(entry["kv_heads"] / num_kv_heads)) + abs(log2(entry["share"] / share))
        return 100 * heads + abs(log2(entry["rows"] / max(num_rows, 1)))

    best = min(fitting, key=distance)
    return Shape(**{name: best[name] for name in Shape._fields if name in best})


def small_lds(device: torch.device) -> bool:
    """At most 64 KiB of shared memory per block (gfx942), or no knowledge of it."""
    return device.type != "cuda" or torch.version.hip is not None


def default_shape(itemsize: int, kv_itemsize: int, head_dim: int, is_small: bool) -> Shape:
    width = triton.next_power_of_2(head_dim) * kv_itemsize
    if itemsize > 2:
        return Shape(32, 4, 1, 2.0)
    if is_small:
        return Shape(64 if width <= 256 else 32, 4, 2, 2.0, fused=False)
    return Shape(64 if width <= 256 else 32, 4, 3, 2.0)


def _aot(
    name: str,
    heads: tuple[int, int, int],
    shape: Shape,
    extras: bool = False,
    num_rows: int = 16,
    targets: tuple[str, ...] = (),
) -> AotCase:
    """`extras`: everything optional at once, with 8-bit keys and values."""
    kv, scale = ("*fp8e4nv:16", "*fp32") if extras else ("*bf16:16", None)
    sizes = _sizes(*heads, shape, num_rows)
    signature: dict[str, Constant] = dict.fromkeys(INTEGERS, "i32")
    signature |= dict.fromkeys(POINTERS, "*i32")
    signature |= dict.fromkeys(("q_stride_t", "q_stride_h"), "i32:16")
    signature |= {"q_ptr": "*bf16:16", "out_ptr": "*bf16:16", "k_ptr": kv, "v_ptr": kv}
    signature |= {"sinks_ptr": "*fp32" if extras else None, "k_scale_ptr": scale, "v_scale_ptr": scale}
    signature |= {"sums_ptr": "*fp32:16", "arrived_ptr": "*i32:16", "factor": "fp32"}
    signature |= {"table_rows_ptr": "*i32" if extras else None, "PAGE": 16, "PDL": False, "FUSED": shape.fused}
    signature |= {"WINDOW": 1024 if extras else 0, "SOFTCAP": 50.0 if extras else 0.0}
    signature |= {"BLOCK_M": _padded_share(*heads[:2]), "FEW": shape.parts > 0, **sizes}
    if name.startswith("join"):
        return AotCase(name, join_kernel, {key: signature[key] for key in join_kernel.arg_names})
    kernel = few_kernel if shape.parts else decode_kernel
    signature = {key: signature[key] for key in kernel.arg_names}
    return AotCase(name, kernel, signature, shape.num_warps, shape.num_stages, targets=targets)


_NVIDIA, _AMD = default_shape(2, 2, 128, False), default_shape(2, 2, 128, True)
_FEW = Shape(64, 4, 2, 0.0, parts=16)
AOT = (
    _aot("16x8x128", (16, 8, 128), _NVIDIA),
    _aot("16x8x128_amd", (16, 8, 128), _AMD),
    _aot("16x8x128_256rows", (16, 8, 128), _NVIDIA, num_rows=256),
    _aot("32x8x128", (32, 8, 128), _NVIDIA),
    _aot("32x4x128", (32, 4, 128), _NVIDIA),
    _aot("32x4x128_amd", (32, 4, 128), _AMD),
    _aot("join", (32, 8, 128), _AMD),
    _aot("16x8x128_few", (16, 8, 128), _FEW),
    _aot("32x8x128_few", (32, 8, 128), _FEW),
    _aot("32x4x128_few", (32, 4, 128), _FEW),
    _aot("32x4x128_few_wide", (32, 4, 128), _FEW._replace(block_kv=128, num_warps=8), targets=("sm_90",)),
    _aot("32x4x128_few_amd", (32, 4, 128), _FEW._replace(fused=False)),
    _aot("32x8x128_few_extras", (32, 8, 128), _FEW._replace(fused=False), extras=True),
    _aot("join_few", (32, 4, 128), _FEW._replace(fused=False)),
    _aot("12x3x64_amd", (12, 3, 64), default_shape(2, 2, 64, True)),
    _aot("32x8x96_amd", (32, 8, 96), default_shape(2, 2, 96, True)),
    _aot("16x8x192_amd", (16, 8, 192), default_shape(2, 2, 192, True)),
    _aot("16x8x256_amd", (16, 8, 256), default_shape(2, 2, 256, True)),
    _aot("32x8x128_extras_amd", (32, 8, 128), default_shape(2, 1, 128, True), extras=True),
)

"""The gated delta rule over chunks of prompts: what does not depend on the state by all chunks at once, then a walk.

A chunk's corrections x solve (I + L) x = beta * r, with L strictly lower triangular and r = v - a * (k S): the UT
transform, x = T r. With f what a key still counts at the chunk's end, one program a chunk and value head leaves
M = T^T (f * k) and P = scores T, so that the walk is r, then S = total * S + M^T r and out = q S + P r: two products
one behind the other. The inverse is in fp32: by substitution in blocks of 16 (one warp each, a launch of its own), then
blocks are joined two by two, X - X B X, by products of narrow operands.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, processors, release, wait
from services.worker.kernels.impl.triton._prefill_attention import _find_row
from services.worker.kernels.ops.gated_delta import L2_EPS
from services.worker.kernels.ops.paged_attention import AttentionRows

EPS = tl.constexpr(L2_EPS)
SIDE = 16  # of the blocks that are inverted by substitution
VALUES = 32  # of E in one program of the walk
MANY_VALUES = 64  # the same, where there are more such programs than processors, each of which has room for one
SHARED_BYTES = 216 << 10  # for tiles of chunks
SMALL_POINTERS = ["starts_ptr", "contexts_ptr", "blocks_ptr"]  # a step's, which may lie anywhere
RUNTIME_ONLY = ["first_row", "num_rows"]


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _find_chunk(starts_ptr, chunk, first_row, num_rows, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chunk's first token and its row's end. Rows before first_row have a token each."""
    place = _find_row(starts_ptr, chunk, first_row, first_row, num_rows, CHUNK)
    begin = tl.load(starts_ptr + first_row + place)
    end = tl.load(starts_ptr + first_row + place + 1)
    return begin + (chunk - (begin - first_row) // CHUNK - place) * CHUNK, end


@triton.jit
def _gates(gates_ptr, tokens, live, decay, bias, stride, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """By token: how much is corrected, and the logarithm of what is kept. Behind the end nothing of either."""
    gates_ptr += tokens * stride
    strength = tl.load(gates_ptr, mask=live, other=0.0).to(tl.float32)
    forgetting = tl.load(gates_ptr + SHARE, mask=live, other=0.0).to(tl.float32)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-strength)), 0.0)
    return beta, tl.where(live, -decay * softplus(forgetting + bias), 0.0)


@triton.jit
def _length(x):  # type: ignore[no-untyped-def]
    """What brings each line to length 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def _between(since, places):  # type: ignore[no-untyped-def]
    """What is kept from a token (column) to a later one. Exponents of other pairs could overflow."""
    return tl.exp(tl.where(places[:, None] >= places[None, :], since[:, None] - since[None, :], 0.0))


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    inverse, lower, narrow: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr
):
    """From the inverses of I + lower within blocks of SIZE to those within blocks twice as large, if there are any."""
    if SIZE < CHUNK:
        rows, columns = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        joined = (rows // (2 * SIZE) == columns // (2 * SIZE)) & (rows // SIZE > columns // SIZE)
        half = inverse.to(narrow)
        part = tl.dot(half, tl.where(joined, lower, 0.0).to(narrow), input_precision="ieee").to(narrow)
        inverse -= tl.dot(part, half, input_precision="ieee")
    return inverse


@triton.jit(do_not_specialize=RUNTIME_ONLY, do_not_specialize_on_alignment=SMALL_POINTERS)
def delta_inverse_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    starts_ptr,
    inverse_ptr,
    first_row,
    num_rows,
    gates_stride,
    GATES_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of I + L within blocks of SIDE tokens. Programs: value heads, blocks of all chunks.

    inverse: float32 [chunks, value heads, CHUNK / SIDE, SIDE, SIDE].
    """
    release(PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1) // (CHUNK // SIDE)
    block = tl.program_id(1) % (CHUNK // SIDE)
    key_head, place = head // SHARE, head % SHARE
    keys, places = tl.arange(0, BLOCK_D), tl.arange(0, SIDE)
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait(PDL)
    first, end = _find_chunk(starts_ptr, chunk, first_row, num_rows, CHUNK)
    first += block * SIDE
    if first >= end:
        return
    tokens = (first + places).to(tl.int64)
    live = tokens < end
    lines = qkv_ptr + (tokens * HEADS + key_head) * (2 * D + SHARE * E) + D
    k = tl.load(lines[:, None] + keys[None, :], mask=live[:, None] & (keys < D)[None, :], other=0.0)
    beta, kept = _gates(gates_ptr + key_head * GATES_HEAD + place, tokens, live, decay, bias, gates_stride, SHARE)
    scale = _length(k)
    near = tl.dot(k, tl.trans(k), input_precision="ieee") * _between(tl.cumsum(kept, 0), places)
    near = tl.where(places[:, None] > places[None, :], near * (scale * beta)[:, None] * scale[None, :], 0.0)
    inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for done in tl.static_range(SIDE - 1):
        here = places == done
        column = tl.sum(tl.where(here[None, :], near, 0.0), 1)
        line = tl.sum(tl.where(here[:, None], inverse, 0.0), 0)
        inverse -= column[:, None] * line[None, :]
    inverse_ptr += ((chunk.to(tl.int64) * HEADS * SHARE + head) * CHUNK + block * SIDE) * SIDE
    tl.store(inverse_ptr + places[:, None] * SIDE + places[None, :], inverse)


@triton.jit(do_not_specialize=RUNTIME_ONLY, do_not_specialize_on_alignment=SMALL_POINTERS)
def delta_prepare_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    starts_ptr,
    inverse_ptr,
    keys_ptr,
    scores_ptr,
    factors_ptr,
    first_row,
    num_rows,
    gates_stride,
    GATES_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """M and P of a chunk and a value head, and what belongs to the raw keys and queries. Programs: value heads, chunks.

    keys: [chunks, value heads, CHUNK, D]; scores: [chunks, value heads, CHUNK, CHUNK], of qkv's type; factors: float32
    [chunks, value heads, 3, CHUNK], of k S, of q S, and the state's.
    """
    release(PDL)
    head, chunk = tl.program_id(0), tl.program_id(1)
    key_head, place = head // SHARE, head % SHARE
    keys, places = tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    decay = tl.load(decay_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait(PDL)
    first, end = _find_chunk(starts_ptr, chunk, first_row, num_rows, CHUNK)
    if first >= end:
        return
    narrow: tl.constexpr = qkv_ptr.dtype.element_ty  # of the operands of products
    tokens = (first + places).to(tl.int64)
    live = tokens < end
    lines = qkv_ptr + (tokens * HEADS + key_head) * (2 * D + SHARE * E)
    mask = live[:, None] & (keys < D)[None, :]
    k = tl.load(lines[:, None] + D + keys[None, :], mask=mask, other=0.0)
    q = tl.load(lines[:, None] + keys[None, :], mask=mask, other=0.0)
    at = chunk.to(tl.int64) * HEADS * SHARE + head
    rows, columns = places[:, None], places[None, :]
    beta, kept = _gates(gates_ptr + key_head * GATES_HEAD + place, tokens, live, decay, bias, gates_stride, SHARE)
    since = tl.cumsum(kept, 0)
    total = tl.sum(kept, 0)
    k_scale, q_scale = _length(k), _length(q) * (D**-0.5)
    factors_ptr += at * 3 * CHUNK + places
    tl.store(factors_ptr, k_scale * tl.exp(since))
    tl.store(factors_ptr + CHUNK, q_scale * tl.exp(since))
    tl.store(factors_ptr + 2 * CHUNK, tl.exp(total + 0.0 * since))
    between = _between(since, places) * k_scale[None, :]
    # what comes before the inverse is narrow by then: registers
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * between * q_scale[:, None]
    scores = tl.where(rows >= columns, scores, 0.0).to(narrow)
    near = tl.dot(k, tl.trans(k), input_precision="ieee") * between * (k_scale * beta)[:, None]
    # blocks behind the end have none: their tokens correct nothing
    mask = live[:, None] & (rows // SIDE == columns // SIDE)
    inverse = tl.load(inverse_ptr + (at * CHUNK + rows) * SIDE + columns % SIDE, mask=mask, other=0.0)
    inverse = _join(inverse, near, narrow, SIDE, CHUNK)
    inverse = _join(inverse, near, narrow, 2 * SIDE, CHUNK) * beta[None, :]
    scores = tl.dot(scores, inverse.to(narrow), input_precision="ieee")
    tl.store(scores_ptr + (at * CHUNK + rows) * CHUNK + columns, scores.to(narrow))
    faded = (inverse * (k_scale * tl.exp(total - since))[:, None]).to(narrow)
    faded = tl.dot(tl.trans(faded), k, input_precision="ieee")
    tl.store(keys_ptr + (at * CHUNK + rows) * D + keys[None, :], faded.to(narrow), mask=(keys < D)[None, :])


@triton.jit(do_not_specialize=RUNTIME_ONLY, do_not_specialize_on_alignment=SMALL_POINTERS)
def delta_walk_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    state_ptr,
    starts_ptr,
    contexts_ptr,
    blocks_ptr,
    keys_ptr,
    scores_ptr,
    factors_ptr,
    out_ptr,
    first_row,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Through the chunks of a row from first_row on. Programs: parts of E, value heads, rows.

    state: float32 [blocks, HEADS * SHARE, D, E]; out: [T, HEADS * SHARE, E].
    """
    release(PDL)
    index = tl.program_id(2)
    head = tl.program_id(1)
    key_head, place = head // SHARE, head % SHARE
    keys, places = tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    values = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    key_mask, value_mask = keys < D, values < E
    state_mask = key_mask[:, None] & value_mask[None, :]
    # the step's numbers and the state are older than the step
    begin = tl.load(starts_ptr + first_row + index)
    end = tl.load(starts_ptr + first_row + index + 1)
    has_state = (begin < end) & (tl.load(contexts_ptr + first_row + index) > end - begin)
    block = tl.load(blocks_ptr + first_row + index).to(tl.int64)
    state_ptr += ((block * HEADS * SHARE + head) * D + keys[:, None]) * E + values[None, :]
    state = tl.load(state_ptr, mask=state_mask & has_state, other=0.0)
    wait(PDL)
    # not before: if no program waited, what comes behind would not wait for what is ahead
    if begin == end:
        return
    narrow: tl.constexpr = qkv_ptr.dtype.element_ty  # of the operands of products
    start = (begin - first_row) // CHUNK + index  # the row's first chunk
    for chunk in tl.range(tl.cdiv(end - begin, CHUNK)):
        tokens = (begin + chunk * CHUNK + places).to(tl.int64)
        live = tokens < end
        lines = qkv_ptr + (tokens * HEADS + key_head) * (2 * D + SHARE * E)
        mask = live[:, None] & key_mask[None, :]
        at = (start + chunk).to(tl.int64) * HEADS * SHARE + head
        factors = factors_ptr + at * 3 * CHUNK
        k = tl.load(lines[:, None] + D + keys[None, :], mask=mask, other=0.0)
        q = tl.load(lines[:, None] + keys[None, :], mask=mask, other=0.0)
        v_mask = live[:, None] & value_mask[None, :]
        v = tl.load(lines[:, None] + (2 * D + place * E) + values[None, :], mask=v_mask, other=0.0)
        faded = tl.load(
            keys_ptr + (at * CHUNK + places[:, None]) * D + keys[None, :], mask=key_mask[None, :], other=0.0
        )
        scores = tl.load(scores_ptr + (at * CHUNK + places[:, None]) * CHUNK + places[None, :])
        k_factor = tl.load(factors + places)
        q_factor = tl.load(factors + CHUNK + places)
        total = tl.load(factors + 2 * CHUNK)
        recalled = state.to(narrow)
        known = tl.dot(k, recalled, input_precision="ieee")
        result = tl.dot(q, recalled, input_precision="ieee") * q_factor[:, None]
        wanted = (v.to(tl.float32) - known * k_factor[:, None]).to(narrow)
        state = tl.dot(tl.trans(faded), wanted, state * total, input_precision="ieee")
        result = tl.dot(scores, wanted, result, input_precision="ieee")
        tl.store(
            out_ptr + (tokens * HEADS * SHARE + head)[:, None] * E + values[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=v_mask,
        )
    tl.store(state_ptr, state, mask=state_mask)


def _sizes(dtype: torch.dtype, heads: int, share: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "SHARE": share,
        "D": key_dim,
        "E": value_dim,
        "BLOCK_D": max(triton.next_power_of_2(key_dim), 16),
        # fp32 serves comparison: its products are unrolled
        "CHUNK": 32 if dtype == torch.float32 else 64,
    }


def _warps(dtype: torch.dtype) -> tuple[int, int]:
    """Of the inverse and of what is prepared."""
    return (4, 8) if dtype == torch.float32 else (1, 4)


class Walk(NamedTuple):
    """Launch geometry of the walk."""

    values: int  # of E in a program
    warps: int
    stages: int

    @classmethod
    def of(cls, sizes: dict[str, int], itemsize: int, is_amd: bool, is_many: bool) -> "Walk":
        values = max(min(triton.next_power_of_2(sizes["E"]), MANY_VALUES if is_many and not is_amd else VALUES), 16)
        if itemsize == 4:
            return cls(values, 8, 1)
        tiles = sizes["CHUNK"] * (3 * sizes["BLOCK_D"] + sizes["CHUNK"] + values) * itemsize
        # an AMD compute unit's 64 KiB have no room for tiles of chunks to come
        return cls(values, 8 if values == MANY_VALUES else 4, 1 if is_amd else max(1, min(3, SHARED_BYTES // tiles)))


def delta_by_chunks(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    bias: Tensor,
    state: Tensor,
    blocks: Tensor,
    rows: AttentionRows,
    out: Tensor,
) -> None:
    """gated_delta of the rows behind those that decode, into `out` [T, H * V, E]."""
    _, value_heads, key_dim, value_dim = state.shape
    num_tokens, heads, _ = qkv.shape
    first, device = rows.num_decode, qkv.device
    num_rows = len(blocks) - first
    sizes = _sizes(qkv.dtype, heads, value_heads // heads, key_dim, value_dim)
    chunk = sizes["CHUNK"]
    most = (num_tokens - first) // chunk + num_rows  # chunks, some of which may not be
    inverse = torch.empty((most, value_heads, chunk, SIDE), dtype=torch.float32, device=device)
    keys = torch.empty((most, value_heads, chunk, key_dim), dtype=qkv.dtype, device=device)
    scores = torch.empty((most, value_heads, chunk, chunk), dtype=qkv.dtype, device=device)
    factors = torch.empty((most, value_heads, 3, chunk), dtype=torch.float32, device=device)
    inputs = qkv, gates, decay, bias, rows.query_starts, inverse
    own: dict[str, Any] = {"gates_stride": gates.stride(0), "GATES_HEAD": gates.stride(1), **sizes, **options(device)}
    delta_inverse_kernel[(value_heads, most * (chunk // SIDE))](
        *inputs, first, num_rows, SIDE=SIDE, num_warps=_warps(qkv.dtype)[0], **own
    )
    is_many = triton.cdiv(value_dim, VALUES) * value_heads * num_rows > processors(device)
    walk = Walk.of(sizes, qkv.element_size(), device.type != "cuda" or torch.version.hip is not None, is_many)
    delta_prepare_kernel[(value_heads, most)](
        *inputs,
        keys,
        scores,
        factors,
        first,
        num_rows,
        SIDE=SIDE,
        num_warps=_warps(qkv.dtype)[1],
        num_stages=1,
        **own,
    )
    delta_walk_kernel[(triton.cdiv(value_dim, walk.values), value_heads, num_rows)](
        qkv, state, rows.query_starts, rows.context_lens, blocks, keys, scores, factors, out, first,
        BLOCK_E=walk.values, num_warps=walk.warps, num_stages=walk.stages, **sizes, **options(device),
    )  # fmt: skip


def _aot(name: str, kernel: Any, is_amd: bool, is_many: bool = False) -> AotCase:
    sizes = _sizes(torch.bfloat16, 16, 2, 128, 128)
    walk = Walk.of(sizes, 2, is_amd, is_many)
    signature: dict[str, Constant] = {"starts_ptr": "*i32", "contexts_ptr": "*i32", "blocks_ptr": "*i64"}
    signature |= dict.fromkeys(("qkv_ptr", "gates_ptr", "out_ptr", "keys_ptr", "scores_ptr"), "*bf16:16")
    signature |= dict.fromkeys(("decay_ptr", "bias_ptr", "state_ptr", "inverse_ptr", "factors_ptr"), "*fp32:16")
    signature |= {"gates_stride": "i32:16", "GATES_HEAD": 4, "first_row": "i32", "num_rows": "i32", "PDL": False}
    signature |= {**sizes, "SIDE": SIDE, "BLOCK_E": walk.values}
    signature = {name: signature[name] for name in kernel.arg_names}
    warps, stages = {
        delta_inverse_kernel: (_warps(torch.bfloat16)[0], 1),
        delta_prepare_kernel: (_warps(torch.bfloat16)[1], 1),
        delta_walk_kernel: (walk.warps, walk.stages),
    }[kernel]
    targets = ("gfx942", "gfx950") if is_amd else ("sm_90",)
    return AotCase(name, kernel, signature, num_warps=warps, num_stages=stages, hot=False, targets=targets)


AOT = (
    *(
        _aot(f"{name}_16x2x128x128{'_amd' if is_amd else ''}", kernel, is_amd)
        for is_amd in (False, True)
        for name, kernel in (
            ("inverse", delta_inverse_kernel),
            ("prepare", delta_prepare_kernel),
            ("walk", delta_walk_kernel),
        )
    ),
    _aot("walk_many_16x2x128x128", delta_walk_kernel, False, True),
)

"""The lightning indexer's scores: a program has some tokens, whose index heads it takes in turns, and every so manieth
block of positions. There are as many programs as fill the chip, however long a context may be: where most are short, a
program for each block that one could have costs more than the scores.

Positions are the rows of its products, so that the sum over heads stays within a few lanes. Keys are read once for all
tokens of a program that are of one sequence. Rows that decode have programs of their own.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._decode_attention import small_lds
from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, processors, release, wait
from services.worker.kernels.ops.index_scores import index_scores
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl

PROGRAMS = 8  # per processor: as many of 4 warps are there at once


@triton.jit(
    do_not_specialize=["first_token", "last_token", "table_stride", "width", "top_k"],
    do_not_specialize_on_alignment=["context_ptr", "tables_ptr", "table_rows_ptr", "weights_ptr", "scores_ptr"],
)
def index_scores_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, NUM_HEADS, HEAD_DIM]
    weights_ptr,  # float32 [T, NUM_HEADS], contiguous
    pages_ptr,  # [blocks, PAGE, ROW]
    scores_ptr,  # float32 [T, width]
    context_ptr,  # int32 [T]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [T] or None
    first_token,
    last_token,  # the first that is not scored
    q_stride,
    table_stride,
    width,
    top_k,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (programs that share the positions, blocks of TOKENS tokens). A context that needs no scores counts as
    none."""
    token = first_token + tl.program_id(1) * TOKENS
    heads, dims, places = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KV)
    own, inside = heads < NUM_HEADS, (dims < HEAD_DIM)[None, :]
    end = tl.minimum(token + TOKENS, last_token)
    q_line, line = q_stride.to(tl.int64), width.to(tl.int64)
    tokens = token + tl.arange(0, TOKENS)
    release(PDL)
    wait(PDL)
    contexts = tl.load(context_ptr + tokens, mask=tokens < end, other=0)
    contexts = tl.where(contexts > top_k, contexts, 0)
    while token < end:
        # tokens .. last - 1 are of the sequence that the first of them is of
        table_row, last = token, token + 1
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + token)
            rows = tl.load(table_rows_ptr + tokens, mask=tokens < end, other=-1)
            last = tl.min(tl.where((tokens > token) & (rows != table_row), tokens, end), 0)
        longest = tl.max(tl.where((tokens >= token) & (tokens < last), contexts, 0), 0)
        for first in tl.range(tl.program_id(0) * BLOCK_KV, longest, tl.num_programs(0) * BLOCK_KV, num_stages=1):
            position = first + places
            key = tl.minimum(position, longest - 1)  # hidden ones are read from a place that is finite
            page = tl.load(tables_ptr + table_row.to(tl.int64) * table_stride + key // PAGE).to(tl.int64)
            place = (page * PAGE + key % PAGE) * ROW + (ROW - HEAD_DIM)
            keys = tl.load(pages_ptr + place[:, None] + dims[None, :], mask=inside, other=0.0)
            keys = keys.to(q_ptr.dtype.element_ty)  # of 8 bits
            for at in tl.range(token, last):
                q_at = q_ptr + at * q_line + (heads * HEAD_DIM)[:, None] + dims[None, :]
                q = tl.load(q_at, mask=own[:, None] & inside, other=0.0)
                weights = tl.load(weights_ptr + at * NUM_HEADS + heads, mask=own, other=0.0)
                scores = tl.maximum(tl.dot(keys, tl.trans(q), input_precision="ieee"), 0.0)
                total = tl.sum(scores * weights[None, :], 1)
                context = tl.load(context_ptr + at)
                seen = position < tl.where(context > top_k, context, 0)
                tl.store(scores_ptr + at * line + position, total, mask=seen)
        token = last


class Shape(NamedTuple):
    tokens: int
    block_kv: int
    num_warps: int
    num_stages: int


def shape_of(itemsize: int, several: bool, is_small: bool) -> Shape:
    """`several`: tokens side by side of one sequence. Of those compiled without spills an H200 took the last one.

    AMD's is by rule.
    """
    if itemsize > 2:
        return Shape(4 if several else 1, 32, 8, 1)
    if not several:
        return Shape(1, 128, 4, 1)
    return Shape(16, 128, 4, 2) if is_small else Shape(32, 128, 4, 2)


@cache
def sharers(device: torch.device, blocks: int) -> int:
    """How many programs share the positions of each of so many blocks of tokens."""
    return max(1, PROGRAMS * processors(device) // blocks)


def _sizes(num_heads: int, head_dim: int, row: int, page: int, shape: Shape) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "ROW": row,
        "PAGE": page,
        "TOKENS": shape.tokens,
        "BLOCK_H": max(16, int(triton.next_power_of_2(num_heads))),
        "BLOCK_D": max(16, int(triton.next_power_of_2(head_dim))),
        "BLOCK_KV": shape.block_kv,
    }


def run(q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, scores: Tensor, top_k: int) -> None:
    for first, last, several in ((0, rows.num_decode, False), (rows.num_decode, len(q), True)):
        if first < last:
            shape = shape_of(q.element_size(), several, small_lds(q.device))
            _launch(q, weights, pages, scores, rows, (first, last, top_k), shape)


def _launch(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    scores: Tensor,
    rows: AttentionRows,
    numbers: tuple[int, int, int],
    shape: Shape,
) -> None:
    (_, num_heads, head_dim), width = q.shape, scores.shape[1]
    first, last, top_k = numbers
    blocks = triton.cdiv(last - first, shape.tokens)
    grid = min(triton.cdiv(width, shape.block_kv), sharers(q.device, blocks)), blocks
    index_scores_kernel[grid](
        q,
        weights,
        pages,
        scores,
        rows.context_lens,
        rows.block_tables,
        rows.table_rows,
        first,
        last,
        q.stride(0),
        rows.block_tables.stride(0),
        width,
        top_k,
        **_sizes(num_heads, head_dim, pages.shape[2], rows.block_tokens, shape),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **options(q.device),
    )


IMPL = Impl(index_scores, "triton", run, needs_gpu)


def _aot(name: str, num_heads: int, several: bool, is_small: bool, pages: str = "*bf16:16") -> AotCase:
    shape = shape_of(2, several, is_small)
    signature: dict[str, Constant] = {"q_ptr": "*bf16:16", "pages_ptr": pages, "weights_ptr": "*fp32"}
    signature |= {"scores_ptr": "*fp32", "context_ptr": "*i32", "tables_ptr": "*i32", "table_rows_ptr": "*i32"}
    signature |= dict.fromkeys(("first_token", "last_token", "table_stride", "width", "top_k"), "i32")
    signature |= {"q_stride": "i32:16", "PDL": False, **_sizes(num_heads, 128, 704, 16, shape)}
    targets = ("gfx942", "gfx950") if is_small else ("sm_90",)
    name = f"{name}{'_chunks' * several}_{'amd' if is_small else 'nvidia'}"
    return AotCase(name, index_scores_kernel, signature, shape.num_warps, shape.num_stages, not several, targets)


AOT = tuple(
    _aot(name, num_heads, several, is_small, pages)
    for name, num_heads, pages in (
        ("deepseek_v32", 64, "*bf16:16"),
        ("glm_5", 32, "*bf16:16"),
        ("deepseek_v32_fp8", 64, "*fp8e4nv:16"),
    )
    for several in (False, True)
    for is_small in (True, False)
)

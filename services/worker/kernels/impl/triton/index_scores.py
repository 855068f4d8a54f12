"""The lightning indexer's scores: a program has one token's index heads and some positions of its context."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.index_scores import index_scores
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl

POSITIONS = 128  # of a program


@triton.jit(
    do_not_specialize=["table_stride", "width"],
    do_not_specialize_on_alignment=["context_ptr", "tables_ptr", "table_rows_ptr", "weights_ptr", "out_ptr"],
)
def index_scores_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, NUM_HEADS, HEAD_DIM]
    weights_ptr,  # float32 [T, NUM_HEADS], contiguous
    pages_ptr,  # [blocks, PAGE, ROW]
    out_ptr,  # float32 [T, width]
    context_ptr,  # int32 [T]
    tables_ptr,  # int32 [.., M]
    table_rows_ptr,  # int32 [T] or None
    q_stride,
    table_stride,
    width,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of positions, T)."""
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_KV
    heads, dims, position = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), first + tl.arange(0, BLOCK_KV)
    release(PDL)
    wait(PDL)
    context = tl.load(context_ptr + token)
    out_ptr += token * width
    if first >= context:
        tl.store(out_ptr + position, tl.full([BLOCK_KV], float("-inf"), tl.float32), mask=position < width)
    else:
        table_row = token
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + token).to(tl.int64)
        own = heads < NUM_HEADS
        mask = own[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + token * q_stride + (heads * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
        weights = tl.load(weights_ptr + token * NUM_HEADS + heads, mask=own, other=0.0)
        key = tl.minimum(position, context - 1)
        page = tl.load(tables_ptr + table_row * table_stride + key // PAGE).to(tl.int64)
        place = (page * PAGE + key % PAGE) * ROW + (ROW - HEAD_DIM)
        keys = tl.load(pages_ptr + place[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
        keys = keys.to(q.dtype)  # of 8 bits
        scores = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        total = tl.sum(scores * weights[:, None], 0)
        tl.store(out_ptr + position, tl.where(position < context, total, float("-inf")), mask=position < width)


def _sizes(num_heads: int, head_dim: int, row: int, page: int, itemsize: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "ROW": row,
        "PAGE": page,
        "BLOCK_H": max(16, int(triton.next_power_of_2(num_heads))),
        "BLOCK_D": max(16, int(triton.next_power_of_2(head_dim))),
        "BLOCK_KV": POSITIONS if itemsize == 2 else POSITIONS // 4,
    }


def run(q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, width: int) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, width), dtype=torch.float32, device=q.device)
    if num_tokens:
        sizes = _sizes(num_heads, head_dim, pages.shape[2], rows.block_tokens, q.element_size())
        index_scores_kernel[(triton.cdiv(width, sizes["BLOCK_KV"]), num_tokens)](
            q,
            weights,
            pages,
            out,
            rows.context_lens,
            rows.block_tables,
            rows.table_rows,
            q.stride(0),
            rows.block_tables.stride(0),
            width,
            num_warps=4,
            **sizes,
            **options(q.device),
        )
    return out


IMPL = Impl(index_scores, "triton", run, needs_gpu)


def _aot(name: str, num_heads: int, pages: str = "*bf16:16") -> AotCase:
    signature: dict[str, Constant] = {"q_ptr": "*bf16:16", "pages_ptr": pages, "weights_ptr": "*fp32"}
    signature |= {"out_ptr": "*fp32", "context_ptr": "*i32", "tables_ptr": "*i32", "table_rows_ptr": "*i32"}
    signature |= {"q_stride": "i32:16", "table_stride": "i32", "width": "i32", "PDL": False}
    return AotCase(name, index_scores_kernel, signature | _sizes(num_heads, 128, 704, 16, 2))


AOT = (_aot("deepseek_v32", 64), _aot("glm_5", 32), _aot("deepseek_v32_fp8", 64, "*fp8e4nv:16"))

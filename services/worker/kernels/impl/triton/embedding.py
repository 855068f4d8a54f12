"""Rows of a table by token id: one program copies a block of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.embedding import embedding
from services.worker.kernels.registry import Impl

BLOCK = 1024


@triton.jit
def embedding_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, table_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[t] = table[ids[t]]. ids: [T]; table: [rows, N]; out: [T, N].

    The next kernel starts only after the wait of this one. So all kernels behind it may read before their own wait
    what was written ahead of it: what a step is given, and the pages of earlier steps.
    """
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    numbers = tl.load(table_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(out_ptr + token * N + cols, numbers, mask=cols < N)


def embedding_by_blocks(ids: Tensor, table: Tensor) -> Tensor:
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    if out.numel():
        embedding_kernel[(len(ids) * ((width + BLOCK - 1) // BLOCK),)](
            ids.contiguous(), table, out, width, BLOCK, num_warps=4, **options(table.device)
        )
    return out


def aot_case(width: int, ids: str) -> AotCase:
    signature: dict[str, Constant] = {
        "ids_ptr": f"*{ids}:16",
        "table_ptr": "*bf16:16",
        "out_ptr": "*bf16:16",
        "N": width,
        "BLOCK": BLOCK,
        "PDL": False,
    }
    return AotCase(f"embedding_{width}_{ids}", embedding_kernel, signature, 4)


IMPL = Impl(embedding, "triton", embedding_by_blocks, needs_gpu)
AOT = (aot_case(1024, "i32"), aot_case(4096, "i32"), aot_case(2048, "i64"))

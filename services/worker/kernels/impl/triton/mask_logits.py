"""Bit masks on logits in one pass: only what is barred is written."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.mask_logits import mask_logits
from services.worker.kernels.registry import Impl

BLOCK = 4096


@triton.jit
def mask_block(logits_ptr, stride, mask_ptr, words, V, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (b, s): tokens b * BLOCK .. of row s. Shapes as in the op; words: of a row of the mask."""
    release(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = offset < V
    wait(PDL)
    word = tl.load(mask_ptr + row * words + offset // 32, mask=inside, other=-1)
    barred = ((word >> (offset % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride + offset, float("-inf"), mask=inside & barred)


def mask_in_place(logits: Tensor, mask: Tensor) -> None:
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    mask_block[(triton.cdiv(vocab_size, BLOCK), num_rows)](
        logits, logits.stride(0), mask, mask.shape[1], vocab_size, BLOCK, num_warps=4, **options(logits.device)
    )


IMPL = Impl(mask_logits, "triton", mask_in_place, needs_gpu)
AOT = tuple(
    AotCase(
        name,
        mask_block,
        {
            "logits_ptr": f"*{name}:16",
            "stride": "i32:16",
            "mask_ptr": "*i32:16",
            "words": "i32:16",
            "V": "i32:16",
            "BLOCK": BLOCK,
            "PDL": False,
        },
        hot=False,
    )
    for name in ("fp32", "bf16")
)

"""Penalties in one pass over the rows that have one, their counts read where they are kept."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._sampling import SINGLES
from services.worker.kernels.ops.penalize import penalize
from services.worker.kernels.registry import Impl

BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=SINGLES)
def penalize_block(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    index_ptr,
    slots_ptr,
    in_output_ptr,
    in_prompt_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (b, p): tokens b * BLOCK .. of the p-th row with a penalty. Shapes as in the op; int8 for bool."""
    release(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < V
    place = tl.program_id(1)
    wait(PDL)
    logits = logits_ptr + tl.load(index_ptr + place) * stride + offset
    slot = tl.load(slots_ptr + place) * V
    repetition = tl.load(repetition_ptr + place)
    x = tl.load(logits, mask=mask, other=0.0)
    count = tl.load(in_output_ptr + slot + offset, mask=mask, other=0)
    seen = (count > 0) | (tl.load(in_prompt_ptr + slot + offset, mask=mask, other=0) != 0)
    x = tl.where(seen, x * tl.where(x > 0, 1.0 / repetition, repetition), x)
    x -= count.to(tl.float32) * tl.load(frequency_ptr + place)
    x -= tl.where(count > 0, tl.load(presence_ptr + place), 0.0)
    tl.store(logits, x, mask=mask)


def penalize_in_place(
    logits: Tensor,
    index: Tensor,
    slots: Tensor,
    in_output: Tensor,
    in_prompt: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    num_rows, vocab_size = len(index), logits.shape[1]
    if not num_rows:
        return
    penalize_block[(triton.cdiv(vocab_size, BLOCK), num_rows)](
        logits, logits.stride(0), index, slots, in_output, in_prompt, presence, frequency, repetition, vocab_size,
        BLOCK, num_warps=4, **options(logits.device),
    )  # fmt: skip


IMPL = Impl(penalize, "triton", penalize_in_place, needs_gpu)
AOT = (
    AotCase(
        "penalize",
        penalize_block,
        {
            "logits_ptr": "*fp32:16",
            "stride": "i32:16",
            "index_ptr": "*i64",
            "slots_ptr": "*i64",
            "in_output_ptr": "*i32:16",
            "in_prompt_ptr": "*i1:16",
            "presence_ptr": "*fp32",
            "frequency_ptr": "*fp32",
            "repetition_ptr": "*fp32",
            "V": "i32:16",
            "BLOCK": BLOCK,
            "PDL": False,
        },
        hot=False,
    ),
)

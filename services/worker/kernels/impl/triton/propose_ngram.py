"""One program per entry, which goes through its row once: 1,024 candidates at a time, the best of all kept."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.propose_ngram import propose_ngram
from services.worker.kernels.registry import Impl

BLOCK = 1024


@triton.jit(do_not_specialize=["row_len", "most"])
def propose_ngram_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    drafted_ptr,
    lengths_ptr,
    slots_ptr,
    offsets_ptr,
    row_len,
    most,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A candidate is a place e in 1 .. length - 1; n is how many tokens before e equal the row's last ones."""
    release(PDL)
    wait(PDL)
    entry = tl.program_id(0)
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    length = tl.load(lengths_ptr + slot)
    if tl.load(offsets_ptr + entry) != 0:
        length = tl.full((), 0, tl.int64)
    row_ptr = tokens_ptr + slot * row_len
    best = tl.full((), -1, tl.int64)
    for start in range(0, length, BLOCK):
        end = start + tl.arange(0, BLOCK)
        running = (end >= 1) & (end < length)
        found = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(1, LONGEST + 1):
            running = running & (end >= back)
            newest = tl.load(row_ptr + length - back, length >= back, -1)
            running = running & (tl.load(row_ptr + end - back, running, -2) == newest)
            found += running.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(found >= SHORTEST, (found << 32) + end, -1), 0))
    if length > 0:
        end = best & 0xFFFFFFFF
        ahead = tl.arange(0, BLOCK_DRAFTS)
        hit = best >= 0
        period = tl.where(hit, length - end, 1)
        wanted = hit & (ahead < most)
        drafts = tl.load(row_ptr + end + ahead % period, wanted, 0)
        tl.store(row_ptr + length + ahead, drafts, wanted)
        tl.store(drafted_ptr + slot, tl.where(hit, most, 0))


def propose_ngram_triton(
    tokens: Tensor,
    drafted: Tensor,
    lengths: Tensor,
    slots: Tensor,
    offsets: Tensor,
    most: int,
    shortest: int,
    longest: int,
) -> None:
    if not slots.shape[0]:
        return
    propose_ngram_kernel[(slots.shape[0],)](
        tokens,
        drafted,
        lengths,
        slots,
        offsets,
        tokens.shape[1],
        most,
        SHORTEST=shortest,
        LONGEST=longest,
        BLOCK_DRAFTS=triton.next_power_of_2(most),
        BLOCK=BLOCK,
        **options(tokens.device),
    )


IMPL = Impl(propose_ngram, "triton", propose_ngram_triton, needs_gpu)
AOT = (
    AotCase(
        "propose_ngram",
        propose_ngram_kernel,
        {
            "tokens_ptr": "*i32:16",
            "drafted_ptr": "*i32:16",
            "lengths_ptr": "*i64:16",
            "slots_ptr": "*i32:16",
            "offsets_ptr": "*i32:16",
            "row_len": "i32",
            "most": "i32",
            "SHORTEST": 2,
            "LONGEST": 4,
            "BLOCK_DRAFTS": 4,
            "BLOCK": BLOCK,
            "PDL": False,
        },
    ),
)

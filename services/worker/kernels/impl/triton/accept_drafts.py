"""One program per 128 entries; each looks back over the drafts of its own row, at most as many as there can be."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.accept_drafts import MOST, Drawn, accept_drafts
from services.worker.kernels.registry import Impl

BLOCK = 128


@triton.jit(do_not_specialize=["count", "row_len", "width"])
def accept_drafts_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    lengths_ptr,
    held_ptr,
    results_ptr,
    slots_ptr,
    context_ptr,
    offsets_ptr,
    ids_ptr,
    drawn_ptr,
    ring_ptr,
    count,
    row_len,
    width,
    MOST: tl.constexpr,
    HAS_RESULTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entries [S]: kept where drawn[t - 1] == ids[t], drawn[t - 2] == ids[t - 1] ... back to the row's first."""
    release(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    offset = tl.load(offsets_ptr + at, live, -1)
    drawn = tl.load(drawn_ptr + at, live, 0)
    kept = offset >= 0
    for back in tl.static_range(MOST):
        inside = live & (offset > back)
        before = tl.load(drawn_ptr + at - back - 1, inside, 0)
        draft = tl.load(ids_ptr + at - back, inside, 0)
        kept = kept & ((before == draft) | (offset <= back))
    following = at + 1 < count
    holds = (tl.load(offsets_ptr + at + 1, following, 0) > 0) & (tl.load(ids_ptr + at + 1, following, -1) == drawn)
    slot = tl.load(slots_ptr + at, live, 0).to(tl.int64)
    context = tl.load(context_ptr + at, live, 0).to(tl.int64)
    tl.store(tokens_ptr + slot * row_len + context, drawn, kept)
    last = kept & (holds == 0)
    tl.store(lengths_ptr + slot, context + 1, last)
    tl.store(held_ptr + slot, offset, last)
    if HAS_RESULTS:
        line = results_ptr + tl.load(ring_ptr) * width
        tl.store(line + at, drawn, live)
        tl.store(line + width // 2 + at, kept.to(tl.int32), live)


def accept_drafts_triton(
    tokens: Tensor, lengths: Tensor, held: Tensor, results: Tensor | None, drawn: Drawn, ring: Tensor | None
) -> None:
    count = drawn.tokens.shape[0]
    if not count:
        return
    has_results = results is not None and ring is not None
    accept_drafts_kernel[(triton.cdiv(count, BLOCK),)](
        tokens,
        lengths,
        held,
        results if has_results else tokens,
        drawn.slots,
        drawn.context_lens,
        drawn.offsets,
        drawn.ids,
        drawn.tokens,
        ring if has_results else tokens,
        count,
        tokens.shape[1],
        results.stride(0) if results is not None else 0,
        MOST=MOST,
        HAS_RESULTS=has_results,
        BLOCK=BLOCK,
        **options(tokens.device),
    )


IMPL = Impl(accept_drafts, "triton", accept_drafts_triton, needs_gpu)
AOT = (
    AotCase(
        "accept_drafts",
        accept_drafts_kernel,
        {
            "tokens_ptr": "*i32:16",
            "lengths_ptr": "*i64:16",
            "held_ptr": "*i32:16",
            "results_ptr": "*i32:16",
            "slots_ptr": "*i32:16",
            "context_ptr": "*i32:16",
            "offsets_ptr": "*i32:16",
            "ids_ptr": "*i32:16",
            "drawn_ptr": "*i32:16",
            "ring_ptr": "*i32:16",
            "count": "i32",
            "row_len": "i32",
            "width": "i32",
            "MOST": MOST,
            "HAS_RESULTS": True,
            "BLOCK": BLOCK,
            "PDL": False,
        },
    ),
)

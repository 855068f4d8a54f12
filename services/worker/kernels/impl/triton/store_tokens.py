"""One program per 256 sampled tokens: two scatters of single integers."""

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.store_tokens import store_tokens
from services.worker.kernels.registry import Impl

BLOCK = 256


@triton.jit(do_not_specialize=["num_sampled", "width"])
def store_tokens_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    results_ptr,
    places_ptr,
    sampled_ptr,
    ring_ptr,
    columns_ptr,
    num_sampled,
    width,
    HAS_RESULTS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """tokens[places] = sampled [S]; results[ring[0], columns] = sampled, without columns 0 .. S - 1."""
    release(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_sampled
    sampled = tl.load(sampled_ptr + at, live, 0)
    tl.store(tokens_ptr + tl.load(places_ptr + at, live, 0), sampled, live)
    if HAS_RESULTS:
        column = at
        if HAS_COLUMNS:
            column = tl.load(columns_ptr + at, live, 0).to(tl.int32)
        tl.store(results_ptr + tl.load(ring_ptr) * width + column, sampled, live)


def store_tokens_triton(
    tokens: Tensor,
    results: Tensor | None,
    places: Tensor,
    sampled: Tensor,
    ring: Tensor | None,
    columns: Tensor | None,
) -> None:
    num_sampled = sampled.shape[0]
    if not num_sampled:
        return
    has_results = results is not None and ring is not None
    store_tokens_kernel[(triton.cdiv(num_sampled, BLOCK),)](
        tokens,
        results if has_results else tokens,
        places,
        sampled,
        ring if has_results else tokens,
        places if columns is None else columns,
        num_sampled,
        results.stride(0) if results is not None else 0,
        HAS_RESULTS=has_results,
        HAS_COLUMNS=columns is not None,
        BLOCK=BLOCK,
        **options(tokens.device),
    )


IMPL = Impl(store_tokens, "triton", store_tokens_triton, needs_gpu)
AOT = (
    AotCase(
        "store_tokens",
        store_tokens_kernel,
        {
            "tokens_ptr": "*i32:16",
            "results_ptr": "*i32:16",
            "places_ptr": "*i64:16",
            "sampled_ptr": "*i32:16",
            "ring_ptr": "*i32:16",
            "columns_ptr": "*i64:16",
            "num_sampled": "i32",
            "width": "i32",
            "HAS_RESULTS": True,
            "HAS_COLUMNS": True,
            "BLOCK": BLOCK,
            "PDL": False,
        },
    ),
)

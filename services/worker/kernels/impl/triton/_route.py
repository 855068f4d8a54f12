"""Kernels of norm_route: norm, router and choice of experts.

A few tokens, one launch: EXPERTS / ROWS programs per token, whose router rows are on their way before the kernel ahead
has ended; the last one to arrive chooses. So launches of this op must not overlap: one stream at a time. More tokens,
two launches: programs of BLOCK_T tokens and BLOCK_E of the router's rows, then the choice of moe_route. Many
tokens: see `_route_rows`.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._moe_choice import store_choice


@triton.jit
def _scaled(x, norm, scale, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The normed values in `dtype`, rounded where the op's meaning rounds them."""
    if dtype == tl.float32:
        return x * scale * norm
    else:
        return ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype)


@triton.jit
def route_few(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    normed_ptr,
    logits_ptr,
    arrived_ptr,
    weights_ptr,
    experts_ptr,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, normed [T, N]; norm [N]; router [E, N]; bias [E] or None; logits fp32 [T, E]; arrived int32 [FEW_TOKENS],
    zero before and after; weights float32, experts int32 [T, K]. Grid (E / ROWS, T).
    """
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HIDDEN_PAD)
    inside = column < HIDDEN
    router_ptrs = router_ptr + tl.minimum(row, EXPERTS - 1)[:, None] * HIDDEN + column[None, :]
    w = tl.load(router_ptrs, mask=inside[None, :], other=0.0)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = _scaled(x, norm, scale, normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * HIDDEN + column, normed, mask=inside & (tl.program_id(0) == 0))
    logits = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + tl.minimum(row, EXPERTS - 1)).to(tl.float32)
    tl.store(logits_ptr + token * EXPERTS + row, logits, mask=row < EXPERTS)
    tl.debug_barrier()  # all of the program's logits before its arrival
    before = tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + token, 0)
        expert = tl.arange(0, EXPERTS_PAD)
        every = tl.load(logits_ptr + token * EXPERTS + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
        store_choice(
            every[None, :],
            token + tl.zeros([1], tl.int32),
            token + 1,
            weights_ptr,
            experts_ptr,
            EXPERTS,
            EXPERTS_PAD,
            TOP_K,
            TOP_K_PAD,
            RENORMALIZE,
            1,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def route_logits(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    normed_ptr,
    logits_ptr,
    eps,
    num_tokens,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `route_few`, without the choice. Grid (E / BLOCK_E, T / BLOCK_T).

    Each program of the same tokens norms them for itself, and stores its share of their columns. A warp has
    a part of K for itself (SPLIT): the tile is too small for several. Few, large steps: each costs its latency.
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    COLUMNS: tl.constexpr = BLOCK_K // SPLIT
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = (token < num_tokens)[None, :, None]
    k = tl.arange(0, SPLIT)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    expert = part * BLOCK_E + tl.arange(0, BLOCK_E)
    expert_in = tl.minimum(expert, EXPERTS - 1)
    rows = token.to(tl.int64)[None, :, None] * HIDDEN
    router_ptrs = router_ptr + expert_in[None, None, :] * HIDDEN + k[:, :, None]
    release(PDL)
    wait(PDL)
    squares = tl.zeros([SPLIT, BLOCK_T], tl.float32)
    for begin in tl.static_range(0, HIDDEN, BLOCK_K):
        inside = (begin + k < HIDDEN)[:, None, :]
        x = tl.load(x_ptr + rows + (begin + k)[:, None, :], mask=here & inside, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=2)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)[None, :, None]
    sums = tl.zeros([SPLIT, BLOCK_T, BLOCK_E], tl.float32)
    for begin in tl.static_range(0, HIDDEN, BLOCK_K):
        inside = begin + k < HIDDEN
        w = tl.load(router_ptrs + begin, mask=inside[:, :, None], other=0.0)
        x = tl.load(x_ptr + rows + (begin + k)[:, None, :], mask=here & inside[:, None, :], other=0.0)
        norm = tl.load(norm_ptr + begin + k, mask=inside, other=0.0).to(tl.float32)
        normed = _scaled(x.to(tl.float32), norm[:, None, :], scale, normed_ptr.dtype.element_ty)
        own = inside & ((begin // COLUMNS + tl.arange(0, SPLIT)[:, None]) % parts == part)
        tl.store(normed_ptr + rows + (begin + k)[:, None, :], normed, mask=here & own[:, None, :])
        sums = tl.dot(normed, w, sums, input_precision="ieee")
    logits = tl.sum(sums, axis=0)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert_in).to(tl.float32)[None, :]
    known = (token < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    tl.store(logits_ptr + token[:, None] * EXPERTS + expert[None, :], logits, mask=known)

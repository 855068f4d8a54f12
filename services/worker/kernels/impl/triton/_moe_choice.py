"""The choice of experts from logits in registers: k rounds of the row's maximum. For moe_route and norm_route."""

import triton
import triton.language as tl


@triton.jit
def store_choice(  # type: ignore[no-untyped-def]
    logits,
    token,
    num_tokens,
    weights_ptr,
    experts_ptr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """logits: fp32 [BLOCK_T, EXPERTS_PAD] of tokens `token` [BLOCK_T]; weights float32, experts int32 [T, K]."""
    expert = tl.arange(0, EXPERTS_PAD)
    rank = tl.arange(0, TOP_K_PAD)
    here = token < num_tokens
    left = tl.where(expert[None, :] < EXPERTS, logits, float("-inf"))
    weights = tl.zeros([BLOCK_T, TOP_K_PAD], tl.float32)
    chosen = tl.zeros([BLOCK_T, TOP_K_PAD], tl.int32)
    largest = tl.max(left, axis=1)
    total = tl.sum(tl.exp(left - largest[:, None]), axis=1)
    total_chosen = tl.zeros([BLOCK_T], tl.float32)
    for k in range(TOP_K):  # unrolled it would be compiled for a quarter of a minute
        value, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        # only a row that is not finite can bring one of the padding
        index = tl.minimum(index, EXPERTS - 1).to(tl.int32)
        weight = tl.exp(value - largest)
        total_chosen += weight
        weights = tl.where(rank[None, :] == k, weight[:, None], weights)
        chosen = tl.where(rank[None, :] == k, index[:, None], chosen)
        left = tl.where(expert[None, :] == index[:, None], float("-inf"), left)
    if RENORMALIZE:
        total = total_chosen
    place = token[:, None].to(tl.int64) * TOP_K + rank[None, :]
    inside = here[:, None] & (rank[None, :] < TOP_K)
    tl.store(weights_ptr + place, weights / total[:, None], mask=inside)
    tl.store(experts_ptr + place, chosen, mask=inside)

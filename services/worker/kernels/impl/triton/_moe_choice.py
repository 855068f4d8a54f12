"""The choice of experts from logits in registers. For moe_route and norm_route.

One token: each expert counts those ahead of it, all at once, since rounds wait for one another. Else k rounds of the
rows' maxima.
"""

import triton
import triton.language as tl

MOST_COUNTED = tl.constexpr(256)  # experts: each is compared with each


@triton.jit
def _ordered(logits):  # type: ignore[no-untyped-def]
    """int32 that compare as the logits do, and of numbers that are none in some order, too: ranks are always a
    permutation."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def store_counted(  # type: ignore[no-untyped-def]
    logits, token, weights_ptr, experts_ptr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """`store_choice` of one token. logits: fp32 [EXPERTS_PAD]."""
    expert = tl.arange(0, EXPERTS_PAD)
    order = tl.where(expert < EXPERTS, _ordered(logits), -0x80000000)
    ahead = order[None, :] > order[:, None]
    ahead |= (order[None, :] == order[:, None]) & (expert[None, :] < expert[:, None])
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    there = tl.where(expert < EXPERTS, logits, float("-inf"))
    weight = tl.exp(there - tl.max(there, axis=0))
    total = tl.sum(tl.where(rank < TOP_K, weight, 0.0) if RENORMALIZE else weight, axis=0)
    place = token.to(tl.int64) * TOP_K + rank
    tl.store(weights_ptr + place, weight / total, mask=rank < TOP_K)
    tl.store(experts_ptr + place, expert, mask=rank < TOP_K)


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

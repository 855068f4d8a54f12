"""Routing in groups with a bias on the choice: one program per token holds its scores as [groups, experts of one]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.ops.moe_route_biased import moe_route_biased
from services.worker.kernels.registry import Facts, Impl

MAX_EXPERTS = 1024


@triton.jit
def route_in_groups(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    scale,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits [T, GROUPS * SIZE]; bias [GROUPS * SIZE], None for the choice of moe_route_grouped.

    weights float32 [T, K]; experts int32 [T, K]. Grid (T).
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    place = tl.arange(0, SIZE_PAD)
    rank = tl.arange(0, TOP_K_PAD)
    expert = group[:, None] * SIZE + place[None, :]
    real = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    logits = tl.load(logits_ptr + token * (GROUPS * SIZE) + expert, mask=real, other=0.0).to(tl.float32)
    if SOFTMAX:
        logits = tl.where(real, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    else:
        scores = tl.sigmoid(logits)
    if bias_ptr is not None:
        choice = tl.where(real, scores + bias, float("-inf"))
        best, first = tl.max(choice, axis=1, return_indices=True, return_indices_tie_break_left=True)
        second = tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), choice), axis=1)
        left = tl.where(group < GROUPS, best + second, float("-inf"))
    else:
        choice = tl.where(real, scores, float("-inf"))
        left = tl.max(choice, axis=1)
    is_open = tl.zeros([GROUPS_PAD], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        chosen_group = tl.argmax(left, axis=0, tie_break_left=True)
        is_open = tl.where(group == chosen_group, 1, is_open)
        left = tl.where(group == chosen_group, float("-inf"), left)
    choice = tl.where((is_open > 0)[:, None], choice, float("-inf"))
    weights = tl.zeros([TOP_K_PAD], tl.float32)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    for k in tl.static_range(TOP_K):
        best, first = tl.max(choice, axis=1, return_indices=True, return_indices_tie_break_left=True)
        row = tl.argmax(best, axis=0, tie_break_left=True)
        # only a row that is not finite can bring one of the padding
        column = tl.minimum(tl.sum(tl.where(group == row, first, 0), axis=0), SIZE - 1)
        taken = expert == row * SIZE + column
        weight = tl.sum(tl.sum(tl.where(taken & real, scores, 0.0), axis=1), axis=0)
        weights = tl.where(rank == k, weight, weights)
        chosen = tl.where(rank == k, tl.minimum(row, GROUPS - 1) * SIZE + column, chosen)
        choice = tl.where(taken, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * TOP_K + rank, weights * scale, mask=rank < TOP_K)
    tl.store(experts_ptr + token * TOP_K + rank, chosen.to(tl.int32), mask=rank < TOP_K)


def run(
    logits: Tensor, bias: Tensor, num_groups: int, top_groups: int, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return launch(logits, bias, (num_groups, top_groups, top_k), renormalize, False, scale)


def launch(
    logits: Tensor, bias: Tensor | None, counts: tuple[int, int, int], renormalize: bool, softmax: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`counts`: groups, of which so many are open, and experts of a token."""
    num_groups, top_groups, top_k = counts
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if num_tokens:
        size = num_experts // num_groups
        route_in_groups[(num_tokens,)](
            logits.contiguous(),
            bias,
            weights,
            experts,
            scale,
            GROUPS=num_groups,
            GROUPS_PAD=triton.next_power_of_2(num_groups),
            SIZE=size,
            SIZE_PAD=triton.next_power_of_2(size),
            TOP_GROUPS=top_groups,
            TOP_K=top_k,
            TOP_K_PAD=triton.next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            SOFTMAX=softmax,
            num_warps=1,
            **options(logits.device),
        )
    return weights, experts


def refuses(facts: Facts) -> str | None:
    if facts.shapes.get("num_experts", 0) > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    return needs_gpu(facts)


def aot_case(name: str, groups: int, size: int, top_groups: int, top_k: int, softmax: bool = False) -> AotCase:
    """`softmax`: as moe_route_grouped asks for it."""
    return AotCase(
        name,
        route_in_groups,
        {
            "logits_ptr": "*fp32:16",
            "bias_ptr": None if softmax else "*fp32:16",
            "weights_ptr": "*fp32:16",
            "experts_ptr": "*i32:16",
            "scale": "fp32",
            "GROUPS": groups,
            "GROUPS_PAD": triton.next_power_of_2(groups),
            "SIZE": size,
            "SIZE_PAD": triton.next_power_of_2(size),
            "TOP_GROUPS": top_groups,
            "TOP_K": top_k,
            "TOP_K_PAD": triton.next_power_of_2(top_k),
            "RENORMALIZE": not softmax,
            "SOFTMAX": softmax,
            "PDL": False,
        },
        num_warps=1,
    )


AOT: tuple[AotCase, ...] = (
    aot_case("glm_4_5_air", 1, 128, 1, 8),
    aot_case("deepseek_v3", 8, 32, 4, 8),
    aot_case("kimi_k2", 1, 384, 1, 8),
)
IMPL = Impl(moe_route_biased, "triton", run, refuses)

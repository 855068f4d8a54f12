"""Norm, router and choice of experts in one launch, whatever the number of tokens.

A few tokens: EXPERTS / ROWS programs per token, whose router rows are on their way before the kernel ahead has ended;
the last one to arrive chooses. So launches of this op must not overlap: one stream at a time. Many tokens: a program
takes BLOCK_T tokens through the whole router by matrix products.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._moe_choice import store_choice
from services.worker.kernels.ops.norm_route import norm_route
from services.worker.kernels.registry import Impl

FEW_TOKENS = 32
MEDIUM_TOKENS = 2048  # up to here programs of 16 tokens, for their number
ROWS, WARPS = 4, 4  # of a program for a few tokens
MOST_LOGITS = 64 * 128  # of a program: with four times as many it spills most of them


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
def route_many(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    normed_ptr,
    weights_ptr,
    experts_ptr,
    eps,
    num_tokens,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `route_few`; one program: BLOCK_T tokens and all experts."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < num_tokens
    k = tl.arange(0, BLOCK_K)
    expert = tl.minimum(tl.arange(0, EXPERTS_PAD), EXPERTS - 1)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    normed_ptrs = normed_ptr + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    router_ptrs = router_ptr + expert[None, :] * HIDDEN + k[:, None]
    wait(PDL)
    release(PDL)
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + begin, mask=here[:, None] & (begin + k < HIDDEN)[None, :], other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / HIDDEN + eps)
    logits = tl.zeros([BLOCK_T, EXPERTS_PAD], tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        inside = begin + k < HIDDEN
        x = tl.load(x_ptrs + begin, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + begin + k, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(router_ptrs + begin, mask=inside[:, None], other=0.0)
        normed = _scaled(x, norm[None, :], scale[:, None], normed_ptr.dtype.element_ty)
        tl.store(normed_ptrs + begin, normed, mask=here[:, None] & inside[None, :])
        logits = tl.dot(normed, w, logits, input_precision="ieee")
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert).to(tl.float32)[None, :]
    store_choice(
        logits,
        token,
        num_tokens,
        weights_ptr,
        experts_ptr,
        EXPERTS,
        EXPERTS_PAD,
        TOP_K,
        TOP_K_PAD,
        RENORMALIZE,
        BLOCK_T,
    )


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters that every launch leaves at zero."""
    return torch.zeros(FEW_TOKENS, dtype=torch.int32, device=device)


def _tiles(experts_pad: int) -> dict[str, int]:
    """Of the router, that fit the 64 KiB of a gfx942."""
    return {"BLOCK_K": 64, "STAGES": 3} if experts_pad <= 256 else {"BLOCK_K": 32, "STAGES": 2}


def run(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if 0 < len(x) <= FEW_TOKENS:
        return run_few(x, norm, eps, router, bias, top_k, renormalize)
    (num_tokens, hidden), num_experts, device = x.shape, router.shape[0], x.device
    normed, weights, experts = _outputs(x, top_k)
    if num_tokens == 0:
        return normed, weights, experts
    experts_pad, top_k_pad = triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)
    block = 16 if num_tokens <= MEDIUM_TOKENS else max(min(64, MOST_LOGITS // experts_pad), 16)
    route_many[(triton.cdiv(num_tokens, block),)](
        x,
        norm,
        router,
        bias,
        normed,
        weights,
        experts,
        eps,
        num_tokens,
        HIDDEN=hidden,
        EXPERTS=num_experts,
        EXPERTS_PAD=max(16, experts_pad),
        TOP_K=top_k,
        TOP_K_PAD=top_k_pad,
        RENORMALIZE=renormalize,
        BLOCK_T=block,
        **_tiles(experts_pad),
        num_warps=4,
        **options(device),
    )
    return normed, weights, experts


def _outputs(x: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a launch: x normed [T, N], weights float32 and experts int32 [T, K]."""
    weights = torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)
    return torch.empty_like(x), weights, torch.empty_like(weights, dtype=torch.int32)


def run_few(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor | None,
    top_k: int,
    renormalize: bool,
    rows: int = ROWS,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_tokens, hidden), num_experts, device = x.shape, router.shape[0], x.device
    normed, weights, experts = _outputs(x, top_k)
    route_few[(triton.cdiv(num_experts, rows), num_tokens)](
        x,
        norm,
        router,
        bias,
        normed,
        torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device),
        _arrived(device),
        weights,
        experts,
        eps,
        HIDDEN=hidden,
        HIDDEN_PAD=triton.next_power_of_2(hidden),
        EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        ROWS=rows,
        TOP_K=top_k,
        TOP_K_PAD=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        num_warps=warps,
        **options(device),
    )
    return normed, weights, experts


def _aot(name: str, kernel: Any, hidden: int, num_experts: int, top_k: int, block: int = 0) -> AotCase:
    arguments: dict[str, Constant] = {
        "x_ptr": "*bf16:16",
        "norm_ptr": "*bf16:16",
        "router_ptr": "*bf16:16",
        "bias_ptr": None,
        "normed_ptr": "*bf16:16",
        "logits_ptr": "*fp32:16",
        "arrived_ptr": "*i32:16",
        "weights_ptr": "*fp32:16",
        "experts_ptr": "*i32:16",
        "eps": "fp32",
        "num_tokens": "i32",
        "HIDDEN": hidden,
        "HIDDEN_PAD": hidden,
        "EXPERTS": num_experts,
        "EXPERTS_PAD": num_experts,
        "ROWS": ROWS,
        "BLOCK_T": block,
        "TOP_K": top_k,
        "TOP_K_PAD": triton.next_power_of_2(top_k),
        "RENORMALIZE": True,
        **_tiles(num_experts),
        "PDL": False,
    }

    return AotCase(name, kernel, {key: arguments[key] for key in kernel.arg_names}, hot=block < 64)


AOT: tuple[AotCase, ...] = (
    _aot("qwen3_30b_a3b_few", route_few, 2048, 128, 8),
    _aot("mixtral_8x7b_few", route_few, 4096, 8, 2),
    _aot("qwen3_30b_a3b_t16", route_many, 2048, 128, 8, 16),
    _aot("qwen3_30b_a3b_t64", route_many, 2048, 128, 8, 64),
    _aot("qwen3_next_few", route_few, 2048, 512, 10),
    _aot("qwen3_next_t16", route_many, 2048, 512, 10, 16),
)
IMPL = Impl(norm_route, "triton", run, needs_gpu)

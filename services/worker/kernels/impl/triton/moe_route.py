"""Top-k softmax of router logits: k rounds of the row's maximum, a few tokens per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._moe_choice import store_choice
from services.worker.kernels.ops.moe_route import moe_route
from services.worker.kernels.registry import Facts, Impl

MAX_EXPERTS = 1024
FEW_TOKENS = 1024  # up to here each token has a program (and a warp) of its own


@triton.jit(do_not_specialize=["num_tokens"])
def route_tokens(  # type: ignore[no-untyped-def]
    logits_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits [T, E]; weights float32 [T, K]; experts int32 [T, K]. One program: BLOCK_T tokens."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS_PAD)
    here = token < num_tokens
    wait(PDL)
    release(PDL)
    logits = tl.load(
        logits_ptr + token[:, None].to(tl.int64) * EXPERTS + expert[None, :],
        mask=here[:, None] & (expert[None, :] < EXPERTS),
        other=0.0,
    ).to(tl.float32)
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


def run(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    device = logits.device
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    if num_tokens == 0:
        return weights, experts
    block = 1 if num_tokens <= FEW_TOKENS else 8
    route_tokens[(triton.cdiv(num_tokens, block),)](
        logits,
        weights,
        experts,
        num_tokens,
        EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_PAD=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        BLOCK_T=block,
        num_warps=1 if block == 1 else 4,
        **options(device),
    )
    return weights, experts


def refuses(facts: Facts) -> str | None:
    if facts.shapes.get("num_experts", 0) > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    return needs_gpu(facts)


def _aot(name: str, num_experts: int, top_k: int, block: int, kind: str = "bf16") -> AotCase:
    return AotCase(
        name,
        route_tokens,
        {
            "logits_ptr": f"*{kind}:16",
            "weights_ptr": "*fp32:16",
            "experts_ptr": "*i32:16",
            "num_tokens": "i32",
            "EXPERTS": num_experts,
            "EXPERTS_PAD": num_experts,
            "TOP_K": top_k,
            "TOP_K_PAD": triton.next_power_of_2(top_k),
            "RENORMALIZE": True,
            "BLOCK_T": block,
            "PDL": False,
        },
        num_warps=1 if block == 1 else 4,
    )


AOT: tuple[AotCase, ...] = (
    _aot("qwen3_30b_a3b", 128, 8, 1),
    _aot("qwen3_30b_a3b_many", 128, 8, 8),
    _aot("qwen3_30b_a3b_behind_norm", 128, 8, 1, "fp32"),
    _aot("qwen3_next_behind_norm", 512, 10, 1, "fp32"),
)
IMPL = Impl(moe_route, "triton", run, refuses)

"""Experts with weights of four bits and 16-bit activations by AITER's Triton kernels, which sort and multiply."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._gate import SILU, gated
from services.worker.kernels.impl.aiter._host import Function, constant, refusal
from services.worker.kernels.ops.moe_int4_whole import moe_int4_whole
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Facts, Impl

ALIGN = Function(
    *_triton.at("moe.moe_align_block_size:moe_align_block_size_triton"),
    needs=("topk_ids", "num_experts", "block_size", "sorted_token_ids", "expert_ids", "num_tokens_post_pad"),
)
MM = Function(
    *_triton.at("moe.moe_op:fused_moe"),
    needs=(
        *("A", "B", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids", "sorted_token_ids", "expert_ids"),
        *("num_tokens_post_padded", "mul_routed_weight", "top_k", "compute_type", "use_fp8_w8a8", "use_int8_w8a16"),
        *("use_int4_w4a16", "block_shape", "config"),
    ),
)
TILES = Function(
    "aiter.ops.triton.utils.moe_config_utils:get_optimal_moe_config", needs=("dtype", "use_int4_w4a16", "M")
)


def fused(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    residual: Tensor,
) -> None:
    if not len(x):
        return
    config = TILES(dtype=x.dtype, use_int4_w4a16=True, M=len(x))
    routing = sorted_pairs(weights, experts, len(down), config)
    up = product(x, (gate_up, gate_up_scales, gate_up_zeros), routing, weighted=False)
    gate = silu_and_mul.meaning if SILU.missing() else partial(gated, activation="silu")
    out = product(gate(up.flatten(0, 1)), (down, down_scales, down_zeros), routing, weighted=True)
    residual.add_(out.sum(1, dtype=torch.float32))


def sorted_pairs(weights: Tensor, experts: Tensor, num_experts: int, config: dict[str, Any]) -> dict[str, Any]:
    """What a product is told of the routing: pairs by expert, each expert's filled up to whole tiles."""
    tile = config["BLOCK_SIZE_M"]
    room = experts.numel() + num_experts * (tile - 1)
    pairs = torch.full((room,), experts.numel(), dtype=torch.int32, device=experts.device)
    owners = torch.empty(-(-room // tile), dtype=torch.int32, device=experts.device)
    count = torch.empty(1, dtype=torch.int32, device=experts.device)
    ALIGN(
        topk_ids=experts,
        num_experts=num_experts,
        block_size=tile,
        sorted_token_ids=pairs,
        expert_ids=owners,
        num_tokens_post_pad=count,
    )
    return {
        "topk_weights": weights,
        "topk_ids": experts,
        "sorted_token_ids": pairs,
        "expert_ids": owners,
        "num_tokens_post_padded": count,
        "config": dict(config),
    }


def product(x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], routing: dict[str, Any], weighted: bool) -> Tensor:
    """[T, K, rows] of x [T, columns]; `weighted`: of x [T * K, columns], times the weights of the pairs."""
    numbers, scales, zeros = weight
    shape = (*routing["topk_ids"].shape, numbers.shape[1])
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    MM(
        A=x,
        B=numbers,
        C=out,
        A_scale=None,
        B_scale=scales,
        B_zp=zeros,
        mul_routed_weight=weighted,
        top_k=1 if weighted else shape[1],
        compute_type=constant("triton.language:bfloat16" if x.dtype == torch.bfloat16 else "triton.language:float16"),
        use_fp8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=True,
        block_shape=[0, numbers.shape[2] * 2 // scales.shape[2]],
        **routing,
    )
    return out


def refuses(facts: Facts) -> str | None:
    return refusal(facts, ALIGN, MM, TILES)


IMPL = Impl(moe_int4_whole, "aiter", fused, refuses)

"""Norm, router and choice of experts, in one to three launches by the number of tokens (see `_route`)."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from services.worker.kernels.impl.triton import _norm, _route_rows
from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options
from services.worker.kernels.impl.triton._route import route_few, route_logits
from services.worker.kernels.impl.triton.moe_route import run as choose
from services.worker.kernels.ops.norm_route import norm_route
from services.worker.kernels.registry import Impl

FEW_TOKENS = 32
FEW_LOGITS = 32 * 128  # each token reads the whole router for itself
MEDIUM_LOGITS = 512 * 128  # up to here the router is shared by programs of 16 tokens, for their number
BLOCK_T = 16  # tokens of a program that shares the router
SHARED_TILE = (16, 512, 4)  # its experts, columns of a step, warps: an H200 takes the same time for larger ones
ROWS, WARPS = 4, 4  # of a program for a few tokens


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters that every launch leaves at zero."""
    return torch.zeros(FEW_TOKENS, dtype=torch.int32, device=device)


def run(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if len(x) == 0:
        return _outputs(x, top_k)
    if len(x) <= FEW_TOKENS and len(x) * len(router) <= FEW_LOGITS:
        return run_few(x, norm, eps, router, bias, top_k, renormalize)
    run = run_shared if len(x) * len(router) <= MEDIUM_LOGITS else run_many
    return run(x, norm, eps, router, bias, top_k, renormalize)


def run_shared(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor | None,
    top_k: int,
    renormalize: bool,
    tile: tuple[int, int, int] = SHARED_TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile`: experts and columns of a program's step, warps."""
    (num_tokens, hidden), num_experts, device = x.shape, router.shape[0], x.device
    block_e, block_k, warps = tile
    normed = torch.empty_like(x)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
    route_logits[(triton.cdiv(num_experts, block_e), triton.cdiv(num_tokens, BLOCK_T))](
        x, norm, router, bias, normed, logits, eps, num_tokens, HIDDEN=hidden, EXPERTS=num_experts,
        BLOCK_T=BLOCK_T, BLOCK_E=block_e, BLOCK_K=block_k, SPLIT=warps, num_warps=warps, **options(device),
    )  # fmt: skip
    return normed, *choose(logits, top_k, renormalize)


def run_many(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed, _ = _norm.launch(x, None, norm, eps)
    return normed, *choose(_route_rows.launch(normed, router, bias), top_k, renormalize)


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
    pointers = ("x", "norm", "router", "normed")
    arguments: dict[str, Constant] = {
        **_route_rows.TILE,
        **{f"{pointer}_ptr": "*bf16:16" for pointer in pointers},
        "bias_ptr": None,
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
        "PDL": False,
    }
    if kernel is route_logits:
        block_e, block_k, warps = SHARED_TILE
        arguments |= {"BLOCK_E": block_e, "BLOCK_K": block_k, "SPLIT": warps}
    return AotCase(name, kernel, {key: arguments[key] for key in kernel.arg_names}, hot=block < 64)


AOT: tuple[AotCase, ...] = (
    _aot("qwen3_30b_a3b_few", route_few, 2048, 128, 8),
    _aot("mixtral_8x7b_few", route_few, 4096, 8, 2),
    _aot("qwen3_30b_a3b_logits", route_logits, 2048, 128, 8, BLOCK_T),
    _aot("qwen3_30b_a3b_many", _route_rows.route_rows, 2048, 128, 8, _route_rows.TILE["BLOCK_T"]),
    _aot("qwen3_next_few", route_few, 2048, 512, 10),
)
IMPL = Impl(norm_route, "triton", run, needs_gpu)

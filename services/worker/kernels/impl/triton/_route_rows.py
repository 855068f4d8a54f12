"""The router's product of many normed rows: logits in fp32, for the choice of moe_route."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import options, release, wait

WIDE_BYTES = 4  # elements of so many take steps of half the columns
TILE = {"BLOCK_T": 64, "BLOCK_E": 64, "BLOCK_K": 64, "STAGES": 3}


@triton.jit(do_not_specialize=["num_tokens"])
def route_rows(  # type: ignore[no-untyped-def]
    normed_ptr,
    router_ptr,
    bias_ptr,
    logits_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed [T, N]; router [E, N]; bias [E] or None; logits fp32 [T, E]. Grid (E / BLOCK_E, T / BLOCK_T)."""
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    expert_in = tl.minimum(expert, EXPERTS - 1)
    token_in = tl.minimum(token, num_tokens - 1)
    k = tl.arange(0, BLOCK_K)
    normed_ptrs = normed_ptr + token_in.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    router_ptrs = router_ptr + expert_in[None, :] * HIDDEN + k[:, None]
    wait(PDL)
    release(PDL)
    logits = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for begin in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        if HIDDEN % BLOCK_K:
            inside = begin + k < HIDDEN
            x = tl.load(normed_ptrs + begin, mask=inside[None, :], other=0.0)
            w = tl.load(router_ptrs + begin, mask=inside[:, None], other=0.0)
        else:
            x = tl.load(normed_ptrs + begin)
            w = tl.load(router_ptrs + begin)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert_in).to(tl.float32)[None, :]
    known = (token < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    tl.store(logits_ptr + token.to(tl.int64)[:, None] * EXPERTS + expert[None, :], logits, mask=known)


def launch(normed: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """normed: [T, N]; router: [E, N]; bias: [E] or None. Returns logits, float32 [T, E]."""
    (num_tokens, hidden), num_experts = normed.shape, router.shape[0]
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=normed.device)
    tile = TILE if normed.element_size() < WIDE_BYTES else TILE | {"BLOCK_K": 32}
    grid = (triton.cdiv(num_experts, tile["BLOCK_E"]), triton.cdiv(num_tokens, tile["BLOCK_T"]))
    constants = tile | {"HIDDEN": hidden, "EXPERTS": num_experts, "num_warps": 4, **options(normed.device)}
    route_rows[grid](normed, router, bias, logits, num_tokens, **constants)
    return logits

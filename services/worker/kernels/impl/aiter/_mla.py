"""How AITER's latent attention is called: which numbers of heads it has kernels for, and the cache in pages of one.

Kernels are listed in AITER by heads and tokens per row. Others are refused there when a step runs, or wrong without a
word (ROCm/aiter#5679: 16 heads and 8 tokens on gfx942), so heads are padded here and long rows are not asked for.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.ops.mla_decode import LATENT, ROPE

ARGUMENTS = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
SIXTEEN_QUERIES = (1, 4)  # tokens per row that kernels of 16 heads have on both architectures
WIDER = (32, 64, 128)  # heads whose kernels take any
WIDER_ONCE = (128,)  # and in older releases


def padded_heads(num_heads: int, max_query: int, wider: Sequence[int] = WIDER) -> int | None:
    """The number of heads to call with, or None where there are too many."""
    if num_heads <= 16 and max_query in SIXTEEN_QUERIES:
        return 16
    return next((heads for heads in wider if heads >= num_heads), None)


def padded(q: Tensor, num_heads: int) -> Tensor:
    """q with heads of zeros behind its own; contiguous."""
    return functional.pad(q, (0, 0, 0, num_heads - q.shape[1])).contiguous()


def paged(cache: Tensor) -> Tensor:
    """[S, D] as pages of one token and one head; no copy."""
    return cache.view(len(cache), 1, 1, cache.shape[1])


def refuses_latent(shapes: Mapping[str, int]) -> str | None:
    latent, rope = shapes.get("kv_lora_rank", LATENT), shapes.get("qk_rope_head_dim", ROPE)
    if (latent, rope) != (LATENT, ROPE):
        return f"latents of {LATENT} and {ROPE} numbers, not of {latent} and {rope}"
    return None


def attended(
    function: Function,
    heads: int,
    q: Tensor,
    cache: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    max_query: int,
    latent: int,
    scale: float,
) -> Tensor:
    """By `function`, called with so many heads. rows: query_starts, kv_starts and kv_slots of the ops."""
    query_starts, kv_starts, kv_slots = rows
    out = torch.empty((len(q), heads, latent), dtype=q.dtype, device=q.device)
    function(
        q=padded(q, heads),
        kv_buffer=paged(cache),
        o=out,
        qo_indptr=query_starts,
        kv_indptr=kv_starts,
        kv_indices=kv_slots,
        kv_last_page_lens=torch.ones_like(kv_starts[1:]),
        max_seqlen_q=max_query,
        sm_scale=scale,
    )
    return out[:, : q.shape[1]]

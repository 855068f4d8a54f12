"""Latent attention of whole prompts, un-absorbed, by AITER's varlen kernels: assembly or CK, as AITER chooses."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.registry import Facts, Impl

VARLEN = Function(
    "aiter:flash_attn_varlen_func",
    needs=(
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal"),
    ),
)
DIMS = ((192, 128), (128, 128), (256, 256))  # of keys and of values: DeepSeek's, GLM-5's, and what all releases have


def attend(
    q: Tensor, kv: Tensor, k_rope: Tensor, query_starts: Tensor, kv_starts: Tensor, max_query: int, scale: float
) -> Tensor:
    nope = q.shape[2] - k_rope.shape[1]
    if not len(q):
        return q.new_empty(0, q.shape[1], kv.shape[2] - nope)
    keys = torch.cat((kv[..., :nope], k_rope[:, None].expand(-1, kv.shape[1], -1)), -1)
    result: Tensor = VARLEN(
        q=q,
        k=keys,
        v=kv[..., nope:],
        cu_seqlens_q=query_starts,
        cu_seqlens_k=kv_starts,
        max_seqlen_q=max_query,
        max_seqlen_k=len(kv),  # the host knows no row's context; what is longer than all of them changes nothing
        softmax_scale=scale,
        causal=True,  # the last of a row's queries sees its last position
    )
    return result


def refuses(facts: Facts) -> str | None:
    shapes = facts.shapes
    keys = shapes.get("qk_nope_head_dim", 128) + shapes.get("qk_rope_head_dim", 64)
    if (dims := (keys, shapes.get("v_head_dim", 128))) not in DIMS:
        return f"has no kernels for keys of {dims[0]} numbers with values of {dims[1]}"
    return refusal(facts, VARLEN)


IMPL = Impl(mla_expanded, "aiter", attend, refuses)

"""Latent attention of prompts and chunks by AITER's assembly kernels, which are for 16 and for 128 heads."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._mla import padded, paged, refuses_latent
from services.worker.kernels.impl.aiter.mla_decode import ARGUMENTS
from services.worker.kernels.ops.mla_prefill import mla_prefill
from services.worker.kernels.registry import Facts, Impl

PREFILL = Function("aiter.mla:mla_prefill_fwd", needs=(*ARGUMENTS, "sm_scale"))
HEADS = (16, 128)


def attend(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    kv_slots: Tensor,
    max_query: int,
    latent: int,
    scale: float,
) -> Tensor:
    heads = next(heads for heads in HEADS if heads >= q.shape[1])
    out = torch.empty((len(q), heads, latent), dtype=q.dtype, device=q.device)
    PREFILL(
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


def refuses(facts: Facts) -> str | None:
    if (heads := facts.shapes.get("num_heads", 1)) > HEADS[-1]:
        return f"{heads} heads, more than {HEADS[-1]}"
    return refuses_latent(facts.shapes) or refusal(facts, PREFILL, dtypes=(torch.bfloat16,))


IMPL = Impl(mla_prefill, "aiter", attend, refuses)

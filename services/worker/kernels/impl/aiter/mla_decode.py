"""Latent attention of decode rows by AITER's assembly kernels, up to four tokens per row."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._mla import ARGUMENTS, WIDER, WIDER_ONCE, attended, padded_heads, refuses_latent
from services.worker.kernels.ops.mla_decode import MAX_VERIFY, mla_decode
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Facts, Impl

DECODE = Function("aiter.mla:mla_decode_fwd", needs=(*ARGUMENTS, "sm_scale"))
LATER = Function("aiter.mla:mla_decode_fwd", needs=(*ARGUMENTS, "sm_scale", "page_size"))  # has more numbers of heads


def attend(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    heads = padded_heads(q_latent.shape[1], rows.max_query, WIDER_ONCE if LATER.missing() else WIDER)
    assert heads is not None and rows.max_query <= MAX_VERIFY, (q_latent.shape, rows.max_query)
    if not len(q_latent):
        return torch.empty_like(q_latent)
    return attended(DECODE, heads, (q_latent, q_rope), pages, rows, scale)


def refuses(facts: Facts) -> str | None:
    if facts.shapes.get("num_heads", 1) > WIDER[-1]:
        return f"more than {WIDER[-1]} heads"
    if (verified := facts.shapes.get("verify_tokens", 1)) > MAX_VERIFY:
        return f"rows of {verified} tokens: AITER is wrong beyond {MAX_VERIFY} (ROCm/aiter#5679)"
    return refuses_latent(facts.shapes) or refusal(facts, DECODE, dtypes=(torch.bfloat16,))


IMPL = Impl(mla_decode, "aiter", attend, refuses)

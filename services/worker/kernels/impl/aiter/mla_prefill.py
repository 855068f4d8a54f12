"""Latent attention of prompts and chunks by AITER's assembly kernels, which are for 16 and for 128 heads."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, refusal
from services.worker.kernels.impl.aiter._mla import ARGUMENTS, attended, refuses_latent
from services.worker.kernels.ops.mla_prefill import mla_prefill
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Facts, Impl

PREFILL = Function("aiter.mla:mla_prefill_fwd", needs=(*ARGUMENTS, "sm_scale"))
HEADS = (16, 128)


def attend(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    heads = next(heads for heads in HEADS if heads >= q_latent.shape[1])
    return attended(PREFILL, heads, (q_latent, q_rope), pages, rows, scale)


def refuses(facts: Facts) -> str | None:
    if (heads := facts.shapes.get("num_heads", 1)) > HEADS[-1]:
        return f"{heads} heads, more than {HEADS[-1]}"
    return refuses_latent(facts.shapes) or refusal(facts, PREFILL, dtypes=(torch.bfloat16,))


IMPL = Impl(mla_prefill, "aiter", attend, refuses)

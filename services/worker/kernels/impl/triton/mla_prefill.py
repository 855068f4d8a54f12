"""Latent attention of prompts and chunks by Triton: few tokens as rows that decode, which go in parts."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton._latent_attention import FEW, attend_chunks, attend_rows
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.mla_prefill import mla_prefill
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl
from services.worker.kernels.row_parts import by_token


def run(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if len(out) > FEW:
        attend_chunks(q_latent, q_rope, out, pages, rows, scale)
    elif len(out):
        attend_rows(q_latent, q_rope, out, pages, by_token(rows, len(out)), scale)
    return out


IMPL = Impl(mla_prefill, "triton", run, needs_gpu)

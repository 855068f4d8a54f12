"""Latent attention of rows with one token, or few of them, by Triton."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton._latent_attention import attend_rows
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.mla_decode import mla_decode
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Impl
from services.worker.kernels.row_parts import by_token


def run(q_latent: Tensor, q_rope: Tensor, pages: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if len(out):
        single = rows if rows.max_query == 1 else by_token(rows, len(out))
        attend_rows(q_latent, q_rope, out, pages, single, scale)
    return out


IMPL = Impl(mla_decode, "triton", run, needs_gpu)

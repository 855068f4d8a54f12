"""Decode rows, which come first, go to one kernel, all other rows to another; their files name what to compile."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton._decode_attention import decode
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.impl.triton._prefill_attention import prefill
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, paged_attention
from services.worker.kernels.registry import Impl


def paged_attention_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec
) -> Tensor:
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    if rows.num_decode:
        decode(q, out, k_cache, v_cache, rows, spec)
    if rows.num_decode < rows.context_lens.shape[0]:
        prefill(q, out, k_cache, v_cache, rows, spec, rows.num_decode, rows.num_decode)
    return out


IMPL = Impl(paged_attention, "triton", paged_attention_pages, needs_gpu, scales_each=True)

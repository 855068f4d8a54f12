"""Paged attention by AITER: rows that decode by one kernel, chunks of prompts by another."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._attention import Pages, decode, prefill
from services.worker.kernels.impl.aiter._pages import layout_of, refuses_reading
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, paged_attention
from services.worker.kernels.registry import Impl


def attention_over_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pages = Pages(k_cache, v_cache)
    if rows.num_decode:
        decode(q, out, pages, rows, spec)
    if rows.num_decode < rows.context_lens.shape[0]:
        prefill(q, out, pages, rows, spec)
    return out


IMPL = Impl(paged_attention, "aiter", attention_over_pages, refuses_reading, layout_of)

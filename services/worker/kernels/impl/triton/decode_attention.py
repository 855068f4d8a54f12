"""One launch from a decode step's projection to its attention; `_decode_attention` has the kernel."""

import torch
from torch import Tensor

from services.worker.kernels.impl.triton._decode_attention import Fresh, launch
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.decode_attention import decode_attention
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Impl


def decode_attention_pages(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    rows: AttentionRows,
    spec: AttentionSpec,
) -> Tensor:
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        launch(heads, out, k_cache, v_cache, rows, spec, None, Fresh(*rotation, slots, head_norm))
    return out


IMPL = Impl(decode_attention, "triton", decode_attention_pages, needs_gpu)

"""Between the projection and attention in one op: norm and rotation of heads, new keys and values into the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Case, Tolerance, op


class HeadNorm(NamedTuple):
    """RMS norm over each head of q and k, before the rotation. Weights: [D]."""

    q: Tensor
    k: Tensor
    eps: float


def make_rope_kv_case(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dims: int | tuple[int, int],
    rotary_dim: int,
    normed: bool,
    fp8: int = 0,
    block_tokens: int = 8,
) -> Case:
    """`head_dims`: of a key and of a value, where these differ."""
    head_dim, value_dim = (head_dims, head_dims) if isinstance(head_dims, int) else head_dims

    def make(dtype: torch.dtype) -> tuple[Tensor | HeadNorm | KvScale | None, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        width = (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim
        qkv = torch.randn(num_tokens, width, generator=generator)
        angle = torch.rand(num_tokens, 1, rotary_dim // 2, generator=generator) * 6.28
        # both are views of one table
        table = torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), -1).to(dtype)
        blocks = num_tokens // block_tokens + 2
        cache = torch.randn(2, blocks, block_tokens, num_kv_heads, head_dim, generator=generator).to(dtype)
        slots = torch.randperm(blocks * block_tokens, generator=generator)[:num_tokens]
        weights = (torch.rand(2, head_dim, generator=generator) + 0.5).to(dtype)
        norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
        kv_scale = None
        if fp8 == 2:
            scales = torch.rand(2, *cache.shape[1:4], generator=generator)
            cache, kv_scale = cache.to(torch.float8_e4m3fn), KvScale(scales[0], scales[1])
        elif fp8:
            cache, kv_scale = cache.to(torch.float8_e4m3fn), KvScale(torch.tensor([0.8]), torch.tensor([0.3]))
        cos, sin = table[..., :rotary_dim], table[..., rotary_dim:]
        values = cache[1] if value_dim == head_dim else cache[1][..., :value_dim].contiguous()
        return qkv.to(dtype), cos, sin, cache[0], values, slots, norm, kv_scale

    suffix = ("normed" if normed else "") + ("", "fp8", "fp8each")[fp8]
    suffix += (f"b{block_tokens}" if block_tokens != 8 else "") + (f"v{value_dim}" if value_dim != head_dim else "")
    name = f"{num_tokens}x{num_heads}+{num_kv_heads}x{head_dim}r{rotary_dim}{suffix}"
    return Case(name, make)


@op(
    cases=[
        make_rope_kv_case(1, 9, 3, 64, 64, False),
        make_rope_kv_case(5, 16, 8, 128, 128, True),
        make_rope_kv_case(11, 4, 1, 20, 8, False),
        make_rope_kv_case(33, 8, 4, 80, 48, True),
        make_rope_kv_case(7, 4, 2, 96, 96, True),
        make_rope_kv_case(9, 6, 2, 64, 64, True, fp8=1),
        make_rope_kv_case(0, 9, 3, 64, 64, False),
    ],
    tolerances={
        torch.float32: Tolerance(4e-6, 4e-6, "one fused multiply-add against two roundings, order of the norm's sum"),
        torch.bfloat16: Tolerance(1.6e-2, 5e-2, "norm and products rounded to 8 bits before the sum, or not", 2**-7),
        torch.float16: Tolerance(2e-3, 6e-3, "norm and products rounded to 11 bits before the sum, or not", 2**-10),
    },
    writes=("k_cache", "v_cache"),
    scratch=("qkv",),
)
def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    kv_scale: KvScale | None,
) -> Tensor:
    """Splits into heads, `rms_norm`s q and k if asked to, `rope`s both, `kv_write`s k and v; returns q, [T, H, D].

    qkv: [T, (H + K) * D + K * E], contiguous, not read afterwards; cos, sin: as `rope` wants them, rows contiguous;
    k_cache: [num_blocks, block_tokens, K, D], v_cache: [num_blocks, block_tokens, K, E], contiguous, written in place;
    slots: int64 [T], distinct; kv_scale: with 8-bit caches, and only with them.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    turning = qkv.shape[1] - num_kv_heads * v_cache.shape[3]
    heads = qkv[:, :turning].view(len(qkv), turning // head_dim, head_dim)
    v_start = heads.shape[1]
    k_start = v_start - num_kv_heads
    if head_norm is None:
        turned = rope.meaning(heads[:, :v_start], cos, sin)
        q, k = turned[:, :k_start], turned[:, k_start:]
    else:
        q = rope.meaning(rms_norm.meaning(heads[:, :k_start], head_norm.q, head_norm.eps), cos, sin)
        k = rope.meaning(rms_norm.meaning(heads[:, k_start:v_start], head_norm.k, head_norm.eps), cos, sin)
    kv_write.meaning(k, qkv[:, turning:].view(len(qkv), *v_cache.shape[2:]), k_cache, v_cache, slots, kv_scale)
    return q

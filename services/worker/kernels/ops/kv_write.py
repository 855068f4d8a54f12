"""New keys and values into their places of the paged cache. Writes the cache in place."""

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


class KvScale(NamedTuple):
    """Of an 8-bit cache: value = stored * scale. Each float32 [1]."""

    k: Tensor
    v: Tensor


def store_kv(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """As a cache of `dtype` holds x; with a scale saturated, since 8-bit floats have no infinity."""
    if scale is None:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)


def make_kv_case(
    num_tokens: int, num_blocks: int, block_tokens: int, num_heads: int, head_dim: int, fp8: bool = False
) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | KvScale | None, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        # strided views, as they come out of a fused projection
        fused = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator).to(dtype)
        cache = torch.randn(2, num_blocks, block_tokens, num_heads, head_dim, generator=generator).to(dtype)
        slots = torch.randperm(num_blocks * block_tokens, generator=generator)[:num_tokens]
        if not fp8:
            return fused[:, 0], fused[:, 1], cache[0], cache[1], slots, None
        cache = cache.to(torch.float8_e4m3fn)
        # small enough that the largest values saturate
        kv_scale = KvScale(torch.tensor([0.004]), torch.tensor([0.03]))
        return fused[:, 0], fused[:, 1], cache[0], cache[1], slots, kv_scale

    return Case(f"{num_tokens}into{num_blocks}x{block_tokens}x{num_heads}x{head_dim}{'fp8' if fp8 else ''}", make)


EXACT = Tolerance(0.0, 0.0, "a copy")


@op(
    cases=[
        make_kv_case(1, 4, 16, 3, 64),
        make_kv_case(37, 5, 8, 2, 20),
        make_kv_case(0, 2, 16, 3, 64),
        make_kv_case(20, 3, 16, 2, 64, fp8=True),
    ],
    tolerances={torch.float32: EXACT, torch.bfloat16: EXACT, torch.float16: EXACT},
    writes=("k_cache", "v_cache"),
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None) -> None:
    """cache[slots[t] // B, slots[t] % B] = k[t], v[t], where B is the number of tokens in a block.

    k: [T, H, D], v: [T, H, E]; k_cache: [num_blocks, B, H, D], v_cache: [num_blocks, B, H, E], contiguous;
    slots: int64 [T], distinct. kv_scale: with 8-bit caches, and only with them.
    """
    if kv_scale is not None:
        k, v = store_kv(k, k_cache.dtype, kv_scale.k), store_kv(v, v_cache.dtype, kv_scale.v)
        # 8-bit floats have no indexed copy of their own
        k, v, k_cache, v_cache = (x.view(torch.uint8) for x in (k, v, k_cache, v_cache))
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

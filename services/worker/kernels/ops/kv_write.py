"""New keys and values into their places of the paged cache. Writes the cache in place."""

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

SMALLEST = 1e-10  # largest number of a head of zeros, so that no scale is 0


class KvScale(NamedTuple):
    """Of an 8-bit cache: value = stored * scale. Each float32, [1], or [num_blocks, B, H]: one for each token and head.

    The latter are written along with the values: as large as the token's largest number in that head needs.
    """

    k: Tensor
    v: Tensor

    @property
    def each(self) -> bool:
        """Whether every token and head has its own."""
        return self.k.dim() == 3


def store_kv(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """As a cache of `dtype` holds x; with a scale saturated, since 8-bit floats have no infinity."""
    if scale is None:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)


def put_in_rows(pages: Tensor, slots: Tensor, first: int, values: Tensor) -> None:
    """Rows' numbers from `first` on become `values` [T, n]. pages: [num_blocks, B, W]; in 8 bits saturated."""
    end = first + values.shape[1]
    if pages.element_size() > 1:
        pages.view(-1, pages.shape[2])[slots, first:end] = values.to(pages.dtype)
        return
    stored = store_kv(values, pages.dtype, torch.ones(1, device=values.device))
    # 8-bit floats have no indexed copy of their own
    pages.view(torch.uint8).view(-1, pages.shape[2])[slots, first:end] = stored.view(torch.uint8)


def own_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [T, H, D]; float32 [T, H]: those under which nothing of a cache of `dtype` is saturated."""
    return x.float().abs().amax(-1).clamp_(min=SMALLEST) / torch.finfo(dtype).max


def make_kv_case(
    num_tokens: int, num_blocks: int, block_tokens: int, num_heads: int, head_dim: int, fp8: int = 0
) -> Case:
    """`fp8`: 1 with one scale, 2 with one for each token and head."""

    def make(dtype: torch.dtype) -> tuple[Tensor | KvScale | None, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        # strided views, as they come out of a fused projection
        fused = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator).to(dtype)
        cache = torch.randn(2, num_blocks, block_tokens, num_heads, head_dim, generator=generator).to(dtype)
        slots = torch.randperm(num_blocks * block_tokens, generator=generator)[:num_tokens]
        if not fp8:
            return fused[:, 0], fused[:, 1], cache[0], cache[1], slots, None
        cache = cache.to(torch.float8_e4m3fn)
        if fp8 == 2:
            scales = torch.rand(2, num_blocks, block_tokens, num_heads, generator=generator)
            return fused[:, 0], fused[:, 1], cache[0], cache[1], slots, KvScale(scales[0], scales[1])
        # small enough that the largest values saturate
        kv_scale = KvScale(torch.tensor([0.004]), torch.tensor([0.03]))
        return fused[:, 0], fused[:, 1], cache[0], cache[1], slots, kv_scale

    return Case(
        f"{num_tokens}into{num_blocks}x{block_tokens}x{num_heads}x{head_dim}{('', 'fp8', 'fp8each')[fp8]}", make
    )


EXACT = Tolerance(0.0, 0.0, "a copy")


@op(
    cases=[
        make_kv_case(1, 4, 16, 3, 64),
        make_kv_case(37, 5, 8, 2, 20),
        make_kv_case(0, 2, 16, 3, 64),
        make_kv_case(20, 3, 16, 2, 64, fp8=1),
    ],
    tolerances={torch.float32: EXACT, torch.bfloat16: EXACT, torch.float16: EXACT},
    writes=("k_cache", "v_cache"),
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scale: KvScale | None) -> None:
    """cache[slots[t] // B, slots[t] % B] = k[t], v[t], where B is the number of tokens in a block.

    k: [T, H, D], v: [T, H, E]; k_cache: [num_blocks, B, H, D], v_cache: [num_blocks, B, H, E], contiguous;
    slots: int64 [T], distinct. kv_scale: with 8-bit caches, and only with them.
    """
    if kv_scale is not None and kv_scale.each:
        scales = KvScale(own_scales(k, k_cache.dtype), own_scales(v, v_cache.dtype))
        for table, new in zip(kv_scale, scales, strict=True):
            table.view(-1, k.shape[1]).index_copy_(0, slots, new)
        kv_scale = KvScale(scales.k[..., None], scales.v[..., None])
    if kv_scale is not None:
        k, v = store_kv(k, k_cache.dtype, kv_scale.k), store_kv(v, v_cache.dtype, kv_scale.v)
        # 8-bit floats have no indexed copy of their own
        k, v, k_cache, v_cache = (x.view(torch.uint8) for x in (k, v, k_cache, v_cache))
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

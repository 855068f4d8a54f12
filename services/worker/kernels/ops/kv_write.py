"""New keys and values into their places of the paged cache. Writes the cache in place."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_kv_case(num_tokens: int, num_blocks: int, block_tokens: int, num_heads: int, head_dim: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        # strided views, as they come out of a fused projection
        fused = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator).to(dtype)
        cache = torch.randn(2, num_blocks, block_tokens, num_heads, head_dim, generator=generator).to(dtype)
        slots = torch.randperm(num_blocks * block_tokens, generator=generator)[:num_tokens]
        return fused[:, 0], fused[:, 1], cache[0], cache[1], slots

    return Case(f"{num_tokens}into{num_blocks}x{block_tokens}x{num_heads}x{head_dim}", make)


EXACT = Tolerance(0.0, 0.0, "a copy")


@op(
    cases=[make_kv_case(1, 4, 16, 3, 64), make_kv_case(37, 5, 8, 2, 20), make_kv_case(0, 2, 16, 3, 64)],
    tolerances={torch.float32: EXACT, torch.bfloat16: EXACT, torch.float16: EXACT},
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """cache[slots[t] // B, slots[t] % B] = k[t], v[t], where B is the number of tokens in a block.

    k, v: [T, H, D]; k_cache, v_cache: [num_blocks, B, H, D], contiguous; slots: int64 [T], distinct.
    """
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

"""How a page of the KV cache is laid out. A page is the same run of bytes in every layout, so whatever copies whole
pages need not know; the ops that take `k_cache` and `v_cache` must agree, and `bind` chooses one for all of them.

TOKENS: keys and values [P, B, K, D]. SHUFFLED, as AITER's assembly kernels read them: keys [P, K, D/x, B, x], values
[P, K, B/x, D, x], x numbers in 16 bytes. P pages of B tokens, K heads of D numbers. Pure.
"""

import torch
from torch import Tensor

TOKENS, SHUFFLED = "tokens", "shuffled"
LAYOUTS = (TOKENS, SHUFFLED)


def lanes(dtype: torch.dtype) -> int:
    """x: how many numbers 16 bytes hold."""
    return 16 // dtype.itemsize


def suits(layout: str, head_dim: int, block_tokens: int, dtype: torch.dtype) -> bool:
    """Whether pages of this shape can be laid out so."""
    return layout == TOKENS or not (head_dim % lanes(dtype) or block_tokens % lanes(dtype))


def pages(layout: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of `keys` and `values` [P, B, K, D], contiguous, as what it is in that layout; nothing is moved."""
    if layout == TOKENS:
        return keys, values
    num_pages, block_tokens, num_heads, head_dim = keys.shape
    assert suits(layout, head_dim, block_tokens, keys.dtype), f"pages of {tuple(keys.shape)} cannot be shuffled"
    x = lanes(keys.dtype)
    return (
        keys.view(num_pages, num_heads, head_dim // x, block_tokens, x),
        values.view(num_pages, num_heads, block_tokens // x, head_dim, x),
    )


def shuffled(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """TOKENS to SHUFFLED: new tensors with the same numbers. The reference of that layout."""
    x = lanes(keys.dtype)
    num_pages, block_tokens, num_heads, head_dim = keys.shape
    by_lane = keys.reshape(num_pages, block_tokens, num_heads, head_dim // x, x)
    by_token = values.reshape(num_pages, block_tokens // x, x, num_heads, head_dim)
    return by_lane.permute(0, 2, 3, 1, 4).contiguous(), by_token.permute(0, 3, 1, 4, 2).contiguous()


def in_order(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Any layout to TOKENS; it is known by the number of dimensions."""
    if k_pages.dim() == 4:
        return k_pages, v_pages
    num_pages, num_heads, _, block_tokens, _ = k_pages.shape
    keys = k_pages.permute(0, 3, 1, 2, 4).reshape(num_pages, block_tokens, num_heads, -1)
    return keys, v_pages.permute(0, 2, 4, 1, 3).reshape(num_pages, block_tokens, num_heads, -1)

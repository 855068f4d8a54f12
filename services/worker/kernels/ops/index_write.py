"""Before DeepSeek-V3.2's indexer in one op: the key's layer norm, rotation of queries and key, and the cache."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.kv_write import put_in_rows
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Case, Sizes, Tolerance, op


class IndexNorm(NamedTuple):
    """Layer norm of a key. Each [D]."""

    weight: Tensor
    bias: Tensor


def make_index_write_case(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotated: int,
    interleaved: bool,
    before: int,
    fp8: int = 0,
) -> Case:
    """`before`: numbers of a page's row before the key. `fp8`: 1 for pages of 8 bits."""

    def make(dtype: torch.dtype) -> tuple[Tensor | IndexNorm | bool, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        # parts of fused projections
        q = torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator).to(dtype)[:, 2:]
        k = torch.randn(num_tokens, 16 + head_dim, generator=generator).to(dtype)[:, 16:]
        angle = torch.rand(num_tokens, 1, rotated // 2, generator=generator) * 6.28
        table = torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), -1).to(dtype)
        blocks = num_tokens // 8 + 2
        pages = torch.randn(blocks, 8, before + head_dim, generator=generator).to(dtype)
        slots = torch.randperm(blocks * 8, generator=generator)[:num_tokens]
        norm = IndexNorm(*(torch.rand(2, head_dim, generator=generator) + 0.5).to(dtype))
        if fp8:
            norm.weight[0] = 4000.0  # so that some saturate
            pages = pages.to(torch.float8_e4m3fn)
        return q, k, table[..., :rotated], table[..., rotated:], norm, pages, slots, interleaved

    return Case(
        f"{num_tokens}x{num_heads}x{head_dim}r{rotated}{'i' if interleaved else ''}b{before}{'fp8' * fp8}", make
    )


@op(
    cases=[
        make_index_write_case(3, 64, 128, 64, False, 576),
        make_index_write_case(9, 5, 16, 8, True, 32),
        make_index_write_case(6, 5, 16, 8, False, 32, fp8=1),
        make_index_write_case(0, 64, 128, 64, False, 576),
    ],
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "one fused multiply-add against two roundings, order of the norm's sums"),
        torch.bfloat16: Tolerance(1.6e-2, 5e-2, "norm and products rounded to 8 bits before the sum, or not"),
        torch.float16: Tolerance(2e-3, 8e-3, "norm and products rounded to 11 bits before the sum, or not"),
    },
    writes=("q", "pages"),
)
def index_write(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: IndexNorm,
    pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Rotates the first R numbers of q's heads in place; puts layer_norm(k) (eps 1e-6), rotated so, into the pages.

    q: [T, H, D], heads of a token side by side; k: [T, D], last dimension dense; cos, sin: [T, 1, R],
    as `rope` wants them; pages: [num_blocks, B, W], contiguous, of whose rows the last D numbers are written, in 8 bits
    saturated; slots: int64 [T], distinct. interleaved: as in latent_write.
    """
    head_dim, rotated = k.shape[1], cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        first = x[..., :rotated]
        if interleaved:
            first = torch.cat((first[..., ::2], first[..., 1::2]), -1)
        return torch.cat((rope.meaning(first, cos, sin), x[..., rotated:]), -1)

    q.copy_(turned(q))
    normed = functional.layer_norm(k.float(), (head_dim,), norm.weight.float(), norm.bias.float(), 1e-6).to(k.dtype)
    put_in_rows(pages, slots, pages.shape[2] - head_dim, turned(normed[:, None])[:, 0])


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models that choose tokens."""
    heads = shapes.get("index_heads", 0)
    for tokens in sizes.all if heads else ():
        before = shapes["latent_row"] - shapes["index_head_dim"]
        dims = shapes["index_head_dim"], shapes["qk_rope_head_dim"]
        yield make_index_write_case(tokens, heads, *dims, False, before, shapes.get("kv_fp8", 0))

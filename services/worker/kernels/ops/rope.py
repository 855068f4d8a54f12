"""Rotary position embedding, rotate-half layout (element i pairs with i + R/2), on the first R of a head's elements."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_rope_case(num_tokens: int, num_heads: int, head_dim: int, rotary_dim: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        # a strided view, as it comes out of a fused projection
        fused = torch.randn(num_tokens, (num_heads + 2) * head_dim, generator=generator).to(dtype)
        x = fused[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
        angle = torch.rand(num_tokens, 1, rotary_dim // 2, generator=generator) * 6.28
        cos = torch.cat((angle.cos(), angle.cos()), -1)
        sin = torch.cat((-angle.sin(), angle.sin()), -1)
        return x, cos.to(dtype), sin.to(dtype)

    return Case(f"{num_tokens}x{num_heads}x{head_dim}r{rotary_dim}", make)


@op(
    cases=[
        make_rope_case(1, 12, 64, 64),
        make_rope_case(17, 5, 128, 128),
        make_rope_case(3, 4, 80, 32),
        make_rope_case(0, 12, 64, 64),
    ],
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-6, "one fused multiply-add against two roundings"),
        torch.bfloat16: Tolerance(1.6e-2, 3e-2, "products rounded to 8 bits before the sum, or not"),
        torch.float16: Tolerance(2e-3, 4e-3, "products rounded to 11 bits before the sum, or not"),
    },
)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + swap_halves(x) * sin, per head. x: [T, H, D], query heads then key heads; returns a new [T, H, D].

    cos, sin: [T, 1, R], x's dtype, R even and at most D; the first half of `sin` is already negated.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return (x * cos).addcmul_(x.roll(rotary_dim // 2, -1), sin)
    turned = x[..., :rotary_dim]
    turned = (turned * cos).addcmul_(turned.roll(rotary_dim // 2, -1), sin)
    return torch.cat((turned, x[..., rotary_dim:]), -1)

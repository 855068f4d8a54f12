"""Between the projections and latent attention in one op: the latent's norm, rotation of queries and key, the cache."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.kv_write import put_in_rows
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Case, Sizes, Tolerance, op


class LatentNorm(NamedTuple):
    """RMS norm of a latent. `weight`: [L]."""

    weight: Tensor
    eps: float


def make_latent_write_case(
    num_tokens: int,
    num_heads: int,
    nope: int,
    sizes: tuple[int, int],
    interleaved: bool,
    more: int = 0,
    fp8: int = 0,
) -> Case:
    """`sizes`: of latent and rotated key; `more`: numbers of a page's row besides. `fp8`: 1 for pages of 8 bits."""

    def make(dtype: torch.dtype) -> tuple[Tensor | LatentNorm | bool, ...]:
        latent, rotated = sizes
        generator = torch.Generator().manual_seed(num_tokens)
        # parts of fused projections
        q = torch.randn(num_tokens, num_heads + 1, nope + rotated, generator=generator).to(dtype)[:, :num_heads]
        kv = torch.randn(num_tokens, 16 + latent + rotated, generator=generator).to(dtype)[:, 16:]
        angle = torch.rand(num_tokens, 1, rotated // 2, generator=generator) * 6.28
        table = torch.cat((angle.cos(), angle.cos(), -angle.sin(), angle.sin()), -1).to(dtype)
        blocks = num_tokens // 8 + 2
        pages = torch.randn(blocks, 8, latent + rotated + more, generator=generator).to(dtype)
        slots = torch.randperm(blocks * 8, generator=generator)[:num_tokens]
        norm = LatentNorm((torch.rand(latent, generator=generator) + 0.5).to(dtype), 1e-6)
        if fp8:
            norm.weight[0] = 4000.0  # so that some saturate
            pages = pages.to(torch.float8_e4m3fn)
        return q, kv, table[..., :rotated], table[..., rotated:], norm, pages, slots, interleaved

    form = "i" if interleaved else ""
    return Case(
        f"{num_tokens}x{num_heads}x{nope}d{sizes[0]}+{sizes[1]}{form}{f'm{more}' if more else ''}{'fp8' * fp8}", make
    )


@op(
    cases=[
        make_latent_write_case(1, 16, 128, (512, 64), True),
        make_latent_write_case(5, 128, 128, (512, 64), True, more=128),
        make_latent_write_case(19, 6, 12, (24, 8), False),
        make_latent_write_case(9, 6, 12, (24, 8), True, more=16),
        make_latent_write_case(6, 6, 12, (24, 8), True, more=16, fp8=1),
        make_latent_write_case(0, 16, 128, (512, 64), True),
    ],
    tolerances={
        torch.float32: Tolerance(4e-6, 4e-6, "one fused multiply-add against two roundings, order of the norm's sum"),
        torch.bfloat16: Tolerance(1.6e-2, 5e-2, "norm and products rounded to 8 bits before the sum, or not"),
        torch.float16: Tolerance(2e-3, 6e-3, "norm and products rounded to 11 bits before the sum, or not"),
    },
    writes=("q", "pages"),
)
def latent_write(
    q: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: LatentNorm,
    pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Rotates the last R numbers of q's heads in place; puts rms_norm(kv[:, :L]) and the rotated rest into the pages.

    q: [T, H, N + R], heads of a token side by side; kv: [T, L + R], last dimension dense; cos, sin: [T, 1, R],
    as `rope` wants them; pages: [num_blocks, B, W], contiguous, of whose rows the first L + R numbers are written, in 8
    bits saturated;
    slots: int64 [T], distinct. interleaved: a pair to rotate lies side by side; its results lie half of R apart.
    """
    latent, rotated = norm.weight.shape[0], cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        return rope.meaning(torch.cat((x[..., ::2], x[..., 1::2]), -1) if interleaved else x, cos, sin)

    q[..., q.shape[2] - rotated :] = turned(q[..., q.shape[2] - rotated :])
    put_in_rows(pages, slots, 0, rms_norm.meaning(kv[:, :latent], norm.weight, norm.eps))
    put_in_rows(pages, slots, latent, turned(kv[:, None, latent:])[:, 0])


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """Of models with latent attention."""
    latent = shapes.get("kv_lora_rank", 0)
    for tokens in sizes.all if latent else ():
        nope, dims = shapes["qk_nope_head_dim"], (latent, shapes["qk_rope_head_dim"])
        more = shapes["latent_row"] - sum(dims)
        fp8 = shapes.get("kv_fp8", 0)
        yield make_latent_write_case(tokens, shapes["num_heads"], nope, dims, True, more, fp8)

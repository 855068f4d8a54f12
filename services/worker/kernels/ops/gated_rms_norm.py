"""RMS normalization of each head, then a SiLU gate (the output norm of gated DeltaNet and of Mamba 2)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Case, Sizes, Tolerance, op


def make_gated_norm_case(tokens: int, groups: int, share: int, width: int) -> Case:
    """`groups` of `share` heads; the gate's lie apart in a wider projection."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
        generator = torch.Generator().manual_seed(tokens + width)
        x = torch.randn(tokens, groups * share, width, generator=generator)
        wide = torch.randn(tokens, groups, share * width + 8, generator=generator)
        weight = torch.rand(width, generator=generator) + 0.5
        return x.to(dtype), wide.to(dtype)[..., 8:], weight.to(dtype), 1e-6

    return Case(f"{tokens}x{groups}x{share}x{width}", make)


@op(
    cases=[
        make_gated_norm_case(1, 16, 2, 128),
        make_gated_norm_case(5, 2, 3, 20),
        make_gated_norm_case(33, 1, 4, 32),
        make_gated_norm_case(0, 2, 2, 16),
    ],
    tolerances={
        torch.float32: Tolerance(4e-6, 4e-6, "order of one sum over the head"),
        torch.bfloat16: Tolerance(1.6e-2, 2e-2, "two roundings to 8 bits, or one"),
        torch.float16: Tolerance(2e-3, 2e-3, "two roundings to 11 bits, or one"),
    },
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate). x: [T, H, D], contiguous; gate: [T, K, H / K * D], last dimension dense; weight: [D].

    Returns a new [T, H, D]; the gate is applied in fp32.
    """
    gates = functional.silu(gate.float()).reshape(x.shape)
    return (normalized(x, weight, eps).float() * gates).to(x.dtype)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    for tokens in sizes.all if shapes.get("delta_heads") else ():
        heads, values = shapes["delta_heads"], shapes["delta_value_heads"]
        yield make_gated_norm_case(tokens, heads, values // heads, shapes["delta_value_dim"])

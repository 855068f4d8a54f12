"""A sigmoid gate on what a layer has computed, one per number."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Sizes, Tolerance, op


def make_sigmoid_case(tokens: int, heads: int, width: int) -> Case:
    """A gate of each number lies beside the queries of its head."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(tokens + width)
        x = torch.randn(tokens, heads, width, generator=generator) * 2
        gate = torch.randn(tokens, heads, 2 * width + 3, generator=generator) * 3
        return x.to(dtype), gate[..., width : 2 * width].to(dtype)

    return Case(f"{tokens}x{heads}x{width}", make)


@op(
    cases=[
        make_sigmoid_case(1, 16, 256),
        make_sigmoid_case(5, 3, 20),
        make_sigmoid_case(0, 2, 16),
    ],
    tolerances={
        torch.float32: Tolerance(2e-6, 1e-6, "another exponential"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-3, "one rounding to 8 bits"),
        torch.float16: Tolerance(2e-3, 1e-4, "one rounding to 11 bits"),
    },
)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in fp32, rounded once. x: [T, H, D], contiguous; gate: [T, H, D], the last dimension
    dense, both of one dtype. Returns a new [T, H, D]."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    for tokens in sizes.all if shapes.get("attention_gate") else ():
        yield make_sigmoid_case(tokens, shapes["num_heads"], shapes["head_dim"])

"""The gates of an expert that all tokens share: its own, and one number a token that says how much of it counts."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Sizes, Tolerance, op


def make_shared_case(tokens: int, width: int, hidden: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(tokens + width)
        halves = torch.randn(tokens, 2 * width, generator=generator) * 2
        x = torch.randn(tokens, hidden, generator=generator)
        weight = torch.randn(1, hidden, generator=generator) * (2 / hidden**0.5)
        return halves.to(dtype), x.to(dtype), weight.to(dtype)

    return Case(f"{tokens}x{width}_{hidden}", make)


@op(
    cases=[
        make_shared_case(1, 512, 2048),
        make_shared_case(5, 20, 72),
        make_shared_case(33, 1100, 96),
        make_shared_case(2, 16, 5000),
        make_shared_case(0, 16, 32),
    ],
    tolerances={
        torch.float32: Tolerance(4e-6, 4e-6, "order of one sum over the row"),
        torch.bfloat16: Tolerance(1.6e-2, 4e-3, "one rounding to 8 bits"),
        torch.float16: Tolerance(2e-3, 5e-4, "one rounding to 11 bits"),
    },
)
def shared_expert_gate(halves: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * sigmoid(x @ weight.T), in fp32, rounded once. Returns a new [T, I].

    halves: [T, 2I], gate first; x: [T, N], what the expert was given; weight: [1, N]; all contiguous, of one dtype.
    """
    gate, up = halves.float().chunk(2, -1)
    counts = (x.float() @ weight.float().T).sigmoid()
    return (functional.silu(gate) * up * counts).to(halves.dtype)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    for tokens in sizes.all if shapes.get("shared_size") else ():
        yield make_shared_case(tokens, shapes["shared_size"], shapes["hidden_size"])

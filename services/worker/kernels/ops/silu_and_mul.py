"""The gate of a SwiGLU MLP (Shazeer 2020): silu(gate) * up, from one fused projection."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Tolerance, op


def make_silu_case(num_tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        return (torch.randn(num_tokens, 2 * width, generator=generator).to(dtype),)

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[make_silu_case(1, 1536), make_silu_case(19, 77), make_silu_case(0, 1536)],
    tolerances={
        torch.float32: Tolerance(2e-6, 1e-6, "approximations of exp differ in the last bits"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, "silu rounded to 8 bits before the product, or not"),
        torch.float16: Tolerance(2e-3, 1e-3, "silu rounded to 11 bits before the product, or not"),
    },
)
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns a new contiguous [T, I]."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)

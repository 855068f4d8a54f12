"""The gate of a GEGLU MLP (Shazeer 2020) with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.silu_and_mul import make_silu_case
from services.worker.kernels.registry import Tolerance, op


@op(
    cases=[make_silu_case(1, 1536), make_silu_case(19, 77), make_silu_case(0, 1536)],
    tolerances={
        torch.float32: Tolerance(4e-6, 2e-6, "approximations of tanh differ in the last bits"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, "gelu rounded to 8 bits before the product, or not"),
        torch.float16: Tolerance(2e-3, 1e-3, "gelu rounded to 11 bits before the product, or not"),
    },
)
def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu_tanh(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns a new contiguous [T, I]."""
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh").mul_(up)

"""The sum over the ranks of this process's group, in place. A process without a group is a group of one."""

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.registry import Case, Tolerance, op


def make_all_reduce_case(num_tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        return (torch.randn(num_tokens, width, generator=generator).to(dtype),)

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[make_all_reduce_case(1, 576), make_all_reduce_case(3, 7), make_all_reduce_case(0, 64)],
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-6, "order of sums over ranks"),
        torch.bfloat16: Tolerance(8e-3, 8e-3, "order of sums over ranks, each rounded to 8 bits"),
        torch.float16: Tolerance(1e-3, 1e-3, "order of sums over ranks, each rounded to 11 bits"),
    },
    writes=("x",),
    by_value=True,  # the others' values are none that a compiler could see
)
def all_reduce(x: Tensor) -> None:
    """x += the x of all other ranks, in place. x: [T, N], contiguous, of one shape at all ranks, which call in one
    order; the result is the same in every bit at all of them."""
    if dist.is_initialized():
        dist.all_reduce(x)

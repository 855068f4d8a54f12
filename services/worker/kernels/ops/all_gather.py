"""What all ranks of this process's group have, one behind the other. A process without a group is a group of one."""

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.registry import Case, Tolerance, op

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12


def make_all_gather_case(num_rows: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_rows + width)
        x = torch.randn(num_rows, width, generator=generator).to(dtype)
        return x, torch.zeros_like(x)

    return Case(f"{num_rows}x{width}", make)


EXACT = Tolerance(0.0, 0.0, "a copy")


@op(
    cases=[make_all_gather_case(1, 130), make_all_gather_case(5, 64), make_all_gather_case(0, 8)],
    tolerances={torch.float32: EXACT, torch.bfloat16: EXACT, torch.float16: EXACT},
    writes=("gathered",),
    by_value=True,
)
def all_gather(x: Tensor, gathered: Tensor) -> None:
    """gathered[r * S : (r + 1) * S] = x of rank r, in place. x: [S, W]; gathered: [ranks * S, W], both contiguous, of
    one shape at all ranks, which call in one order."""
    if dist.is_initialized():
        gather(gathered, x)
    else:
        gathered.copy_(x)

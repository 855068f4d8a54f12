"""The sum over ranks, its add to the residual stream and the norm behind it, in one op.

Where nobody has it in one kernel the layers do not ask for it: then a product takes the norm (docs/adr/0013).
"""

import torch
from torch import Tensor

from services.worker.kernels.ops.add_rms_norm import make_add_norm_case
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Tolerance, op


@op(
    cases=[make_add_norm_case(1, 576), make_add_norm_case(33, 1024), make_add_norm_case(0, 576)],
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "order of sums over ranks, and over the row"),
        torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, "sums over ranks rounded to 8 bits, once per rank or once in all"),
        torch.float16: Tolerance(2e-3, 2e-3, "sums over ranks rounded to 11 bits, once per rank or once in all"),
    },
    writes=("residual",),
    by_value=True,  # as all_reduce
    scratch=("share",),
)
def all_reduce_add_norm(share: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += the sum of all ranks' shares, in place; returns rms_norm(residual, weight, eps), [T, N], new.

    share, residual: [T, N], contiguous; weight: [N]. Ranks as in all_reduce; residual and result are the same in every
    bit at all of them, if residual was.
    """
    all_reduce.meaning(share)
    residual.add_(share)
    return normalized(residual, weight, eps)

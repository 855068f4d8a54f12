"""The sum over ranks with the add and the norm behind it: one kernel of AITER's for few rows, else three."""

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter import _all_reduce
from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed, refuses_norm
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Facts, Impl


def summed_and_normed(share: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not share.numel():
        return torch.empty_like(share)
    if dist.is_initialized():
        together = _all_reduce.of_process()
        if (both := together.sum_and_norm(share, residual, weight, eps)) is not None:
            residual.copy_(both[1])
            return both[0]
        share = together.sum(share)
    # not ADD_RMS_NORM: nothing says that its two residuals may be one
    return normed(residual.add_(share), weight, eps)


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, RMS_NORM, _all_reduce.MAKE, _all_reduce.SUM, _all_reduce.SUM_AND_NORM)


IMPL = Impl(all_reduce_add_norm, "aiter", summed_and_normed, refuses, around_capture=_all_reduce.around_capture)

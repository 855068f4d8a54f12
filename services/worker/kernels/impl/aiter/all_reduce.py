"""The sum over ranks by AITER's kernels, put back in place: others may still read what was summed."""

from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter import _all_reduce
from services.worker.kernels.impl.aiter._host import refusal
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.registry import Facts, Impl


def summed(x: Tensor) -> None:
    if dist.is_initialized() and x.numel():
        total = _all_reduce.of_process().sum(x)
        if total is not x:
            x.copy_(total)


def refuses(facts: Facts) -> str | None:
    return refusal(facts, _all_reduce.MAKE, _all_reduce.SUM)


IMPL = Impl(all_reduce, "aiter", summed, refuses, around_capture=_all_reduce.around_capture)

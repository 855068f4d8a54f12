"""Sums over the GPUs of a node by AITER's kernels, which read the others' memory over XGMI: for a few MiB at most.

One object per process, made by its first sum: that one every rank makes at the same time. What is too large, or no
multiple of 16 bytes, goes through the process group (RCCL), and so does everything where the GPUs are not connected
each to each, or are not 2, 4, 6 or 8. The environment variable AITER_CUSTOM_AR_MAX_SIZE=0 sends everything there.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter._host import Function

_CUSTOM = "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce"
MAKE = Function(_CUSTOM, needs=("group", "device"))
SUM = Function(f"{_CUSTOM}.custom_all_reduce", needs=("self", "input"))
# Older ones, without `use_1stage`, give the two results in another order, and nothing at all for most widths.
SUM_AND_NORM = Function(
    f"{_CUSTOM}.custom_fused_ar_rms", needs=("self", "input", "residual_inp", "weight", "eps", "use_1stage")
)
NORM_WIDEST, PACK = 8192, 8  # numbers of a row: one block of 1,024 threads has it, 16 bytes each
NORM_TOKENS = 80  # blocks, one for each row
# Bytes up to which each rank sums everything itself, and the norm comes along. Above that two kernels are as fast: on
# an MI355X 3 to 15 % slower one way, 5 to 8 % the other (vllm-project/vllm PR 54787).
NORM_BYTES = {2: 256 << 10, 4: 256 << 10, 8: 128 << 10}


class AllReduce:
    """Only where MAKE and SUM are there. `handles`: a process group for host memory (gloo)."""

    def __init__(self, handles: dist.ProcessGroup, device: torch.device) -> None:
        self._custom: Any = MAKE(group=handles, device=device)
        self._norm_bytes = NORM_BYTES.get(dist.get_world_size(handles), 0)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, contiguous: a new tensor, or x itself; every rank calls in the same order."""
        result: Tensor | None = SUM(self=self._custom, input=x)
        if result is None:
            dist.all_reduce(x)
            return x
        return result

    def sum_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """Norm and new residual, both new; None: not in one kernel at this size, which is the same at all ranks.

        Only where SUM_AND_NORM is there. x, residual: contiguous [T, N].
        """
        if x.nbytes >= self._norm_bytes or len(x) > NORM_TOKENS or x.shape[1] > NORM_WIDEST or x.shape[1] % PACK:
            return None
        results: tuple[Tensor, Tensor] | None = SUM_AND_NORM(
            self=self._custom, input=x, residual_inp=residual, weight=weight, eps=eps, use_1stage=True
        )
        return results

    def capture(self) -> AbstractContextManager[Any]:
        """Around the capture of graphs, in which sums read the graph's own buffers; outside of the capture inside of
        it sums are zeros."""
        context: AbstractContextManager[Any] = self._custom.capture()
        return context


@cache
def of_process() -> AllReduce:
    """Of the default process group. A collective: all ranks call it at the same time."""
    return AllReduce(dist.new_group(backend="gloo"), own_device())


def own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def around_capture() -> AbstractContextManager[Any]:
    """Of every op that sums by this object: graphs are captured in one such context."""
    return of_process().capture() if dist.is_initialized() else nullcontext()

"""Sums over the GPUs of a node by AITER's kernels, which read the others' memory over XGMI: for a few MiB at most.

One object per process, made by its first sum: that one every rank makes at the same time. What is too large, or no
multiple of 16 bytes, goes through the process group (RCCL), and so does everything where the GPUs are not connected
each to each, or are not 2, 4, 6 or 8. The environment variable AITER_CUSTOM_AR_MAX_SIZE=0 sends everything there.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter._host import find

CUSTOM = ("aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce",)


def missing() -> str | None:
    """Why this host's AITER has no such object, or None."""
    found = find(CUSTOM)
    return found if isinstance(found, str) else None


class AllReduce:
    """Only where `missing` says None. `handles`: a process group for host memory (gloo)."""

    def __init__(self, handles: dist.ProcessGroup, device: torch.device) -> None:
        found = find(CUSTOM)
        assert not isinstance(found, str), found
        self._custom: Any = found[1](group=handles, device=device)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, contiguous: a new tensor, or x itself; every rank calls in the same order."""
        result: Tensor | None = self._custom.custom_all_reduce(input=x)
        if result is None:
            dist.all_reduce(x)
            return x
        return result

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

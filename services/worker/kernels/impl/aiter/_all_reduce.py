"""Sums over the GPUs of a node by AITER's kernels, which read the others' memory over XGMI: for a few MiB at most.

One object per group of ranks, made by its owner after the process group and closed before it; not yet made by anyone
here, since a worker has one GPU. What is too large, or no multiple of 16 bytes, goes through the process group
(RCCL). The environment variable AITER_CUSTOM_AR_MAX_SIZE=0 sends everything there.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.kernels.impl.aiter._host import find
from services.worker.kernels.impl.aiter.add_rms_norm import added_and_normed

CUSTOM = ("aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce",)


def missing() -> str | None:
    """Why this host's AITER has no such object, or None."""
    found = find(CUSTOM)
    return found if isinstance(found, str) else None


class AllReduce:
    """Only where `missing` says None.

    `handles`: a process group for host memory (gloo) of 2, 4, 6 or 8 ranks; `large`: one for device memory.
    """

    def __init__(self, handles: dist.ProcessGroup, large: dist.ProcessGroup, device: torch.device) -> None:
        found = find(CUSTOM)
        assert not isinstance(found, str), found
        self._custom: Any = found[1](group=handles, device=device)
        self._large = large
        # Releases without this choice return the two results the other way round, and may take the kernel that is
        # wrong in the first replay after a pause (ROCm/aiter#4888): there the norm is a kernel of its own.
        self.fuses_norm = "use_1stage" in inspect.signature(self._custom.custom_fused_ar_rms).parameters

    @property
    def enabled(self) -> bool:
        """False where the GPUs are not connected each to each, or AITER cannot: all sums are RCCL's."""
        return not self._custom.disabled

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, contiguous, a new tensor; every rank calls in the same order."""
        result: Tensor | None = self._custom.custom_all_reduce(input=x)
        if result is None:
            result = x.clone()
            dist.all_reduce(result, group=self._large)
        return result

    def sum_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum(x) + residual), sum(x) + residual), new tensors. x, residual: [T, N]; weight: [N]."""
        if self.fuses_norm:
            both: tuple[Tensor, Tensor] | None = self._custom.custom_fused_ar_rms(
                input=x.contiguous(), residual_inp=residual, weight=weight, eps=eps, use_1stage=False
            )
            if both is not None:
                return both
        return added_and_normed(self.sum(x), residual, weight, eps)

    def capture(self) -> AbstractContextManager[Any]:
        """Around the capture of graphs, in which sums read the graph's own buffers; outside of the capture inside of
        it sums are zeros."""
        context: AbstractContextManager[Any] = self._custom.capture()
        return context

    def close(self) -> None:
        self._custom.close()

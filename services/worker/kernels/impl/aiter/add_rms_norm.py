"""Residual add and RMS normalization in one kernel of AITER."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._norm import ADD_RMS_NORM, refuses_norm
from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from services.worker.kernels.registry import Facts, Impl


def added_and_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        ADD_RMS_NORM(
            out=out, input=x, residual_in=residual.contiguous(), residual_out=total, weight=weight, epsilon=eps
        )
    return out, total


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, ADD_RMS_NORM)


IMPL = Impl(add_rms_norm, "aiter", added_and_normed, refuses)

"""Residual add and RMS normalization by the kernel of `_norm`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _norm
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from services.worker.kernels.registry import Impl


def add_rms_norm_by_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = _norm.launch(x, residual, weight, eps)
    assert total is not None
    return out, total


IMPL = Impl(add_rms_norm, "triton", add_rms_norm_by_rows, needs_gpu)
AOT = tuple(_norm.aot_case("add_rms_norm", rows, width, True) for width in (1024, 2048, 4096) for rows in (1, 2))

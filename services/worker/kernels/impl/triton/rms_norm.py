"""RMS normalization by the kernel of `_norm`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _norm
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Impl


def rms_norm_by_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm.launch(x, None, weight, eps)[0]


IMPL = Impl(rms_norm, "triton", rms_norm_by_rows, needs_gpu)
AOT = tuple(_norm.aot_case("rms_norm", rows, width, False) for width in (128, 1024, 2048, 4096) for rows in (1, 2))

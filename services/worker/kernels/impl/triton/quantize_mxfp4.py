"""Rows to MXFP4 by the kernel of `_quantize`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _quantize
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.registry import Impl


def run(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantize.launch_mx(x, None)


IMPL = Impl(quantize_mxfp4, "triton", run, needs_gpu)
AOT = (_quantize.aot_mx(4096, four_bits=True),)

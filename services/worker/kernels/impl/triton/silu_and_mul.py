"""SwiGLU's gate by the kernel of `_gate`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _gate
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Impl


def silu_and_mul_by_blocks(x: Tensor) -> Tensor:
    return _gate.launch(x, "silu")


IMPL = Impl(silu_and_mul, "triton", silu_and_mul_by_blocks, needs_gpu)
AOT = _gate.aot_cases("silu_and_mul", "silu")

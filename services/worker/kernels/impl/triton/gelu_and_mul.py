"""GEGLU's gate by the kernel of `_gate`."""

from torch import Tensor

from services.worker.kernels.impl.triton import _gate
from services.worker.kernels.impl.triton._launch import needs_gpu
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.registry import Impl


def gelu_and_mul_by_blocks(x: Tensor) -> Tensor:
    return _gate.launch(x, "gelu_tanh")


IMPL = Impl(gelu_and_mul, "triton", gelu_and_mul_by_blocks, needs_gpu)
AOT = _gate.aot_cases("gelu_and_mul", "gelu_tanh")

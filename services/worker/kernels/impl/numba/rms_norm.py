"""RMS norm of few rows in one call; many rows go the torch way, which shares them between threads."""

from typing import Any

import torch
from numba import njit, types
from torch import Tensor

from services.worker.kernels.impl.numba._team import (
    as_float,
    float_bits,
    floats,
    kernel,
    launch,
    refuses_but_fp32,
)
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Impl

ROWS_LIMIT = 32


@njit(fastmath={"reassoc", "contract", "nsz"})
def _row(x: Any, weight: Any, out: Any, size: int, eps: Any) -> None:
    squares = types.float32(0.0)
    for i in range(size):
        squares += x[i] * x[i]
    factor = types.float32(1.0) / types.float32((squares / types.float32(size) + eps) ** types.float32(0.5))
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


def _rows(numbers: Any, thread: int, threads: int) -> None:
    rows, size, eps = numbers[3], numbers[4], as_float(types.int32(numbers[5]))
    for row in range(rows):
        at = row * size * 4
        _row(floats(numbers[0] + at), floats(numbers[1]), floats(numbers[2] + at), size, eps)


_ROWS = kernel(_rows)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    rows = x.numel() // size
    if not 0 < rows < ROWS_LIMIT or not x.is_contiguous():
        return rms_norm.meaning(x, weight, eps)
    out = torch.empty_like(x)
    launch(_ROWS, 1, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, float_bits(eps))
    return out


IMPL = Impl(rms_norm, "numba", rms_norm_rows, refuses_but_fp32)

"""Residual add and norm in one pass over few rows; many rows go the torch way, which shares them between threads."""

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
from services.worker.kernels.ops.add_rms_norm import add_rms_norm
from services.worker.kernels.registry import Impl

ROWS_LIMIT = 32


@njit(fastmath={"reassoc", "contract", "nsz"})
def _row(x: Any, residual: Any, weight: Any, out: Any, total: Any, size: int, eps: Any) -> None:
    squares = types.float32(0.0)
    for i in range(size):
        value = x[i] + residual[i]
        total[i] = value
        squares += value * value
    factor = types.float32(1.0) / types.float32((squares / types.float32(size) + eps) ** types.float32(0.5))
    for i in range(size):
        out[i] = total[i] * factor * weight[i]


def _rows(numbers: Any, thread: int, threads: int) -> None:
    rows, size, eps = numbers[5], numbers[6], as_float(types.int32(numbers[7]))
    for row in range(rows):
        at = row * size * 4
        x, residual, weight = floats(numbers[0] + at), floats(numbers[1] + at), floats(numbers[2])
        _row(x, residual, weight, floats(numbers[3] + at), floats(numbers[4] + at), size, eps)


_ROWS = kernel(_rows)


def add_rms_norm_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    if not 0 < rows < ROWS_LIMIT or not (x.is_contiguous() and residual.is_contiguous()):
        return add_rms_norm.meaning(x, residual, weight, eps)
    both = torch.empty(2, rows, size)
    out, total = both.unbind(0)
    inputs = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    launch(_ROWS, 1, *inputs, out.data_ptr(), total.data_ptr(), rows, size, float_bits(eps))
    return out, total


IMPL = Impl(add_rms_norm, "numba", add_rms_norm_rows, refuses_but_fp32)

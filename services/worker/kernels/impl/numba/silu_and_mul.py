"""The SwiGLU gate in one pass; vectorized, with exp as a polynomial."""

from typing import Any

import torch
from numba import njit, types
from torch import Tensor

from services.worker.kernels.impl.numba._team import (
    as_float,
    floats,
    kernel,
    launch,
    refuses_but_fp32,
)
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Impl

ROWS_LIMIT = 32


@njit(fastmath={"contract"}, error_model="numpy")
def _gate(gate: Any, up: Any, out: Any, size: int) -> None:
    """out = gate * up / (1 + exp(-gate)). exp is 2^n times Cephes' polynomial, of -|gate|, so that it stays finite."""
    for i in range(size):
        value = gate[i]
        x = max(-abs(value), types.float32(-87.0))
        n = types.int32(x * types.float32(1.44269504088896341) - types.float32(0.5))
        whole = types.float32(n)
        r = x - whole * types.float32(0.693359375)
        r = r - whole * types.float32(-2.12194440e-4)
        p = types.float32(1.9875691500e-4)
        p = p * r + types.float32(1.3981999507e-3)
        p = p * r + types.float32(8.3334519073e-3)
        p = p * r + types.float32(4.1665795894e-2)
        p = p * r + types.float32(1.6666665459e-1)
        p = p * r + types.float32(5.0000001201e-1)
        small = (p * r * r + r + types.float32(1.0)) * as_float(types.int32((n + types.int32(127)) << types.int32(23)))
        # sigmoid(g) is 1 / (1 + e^-g) above zero and e^g / (1 + e^g) below
        top = types.float32(1.0) if value >= types.float32(0.0) else small
        out[i] = value * (top / (types.float32(1.0) + small)) * up[i]


def _rows(numbers: Any, thread: int, threads: int) -> None:
    rows, size = numbers[2], numbers[3]
    for row in range(thread * rows // threads, (thread + 1) * rows // threads):
        gate = numbers[0] + row * size * 8
        _gate(floats(gate), floats(gate + size * 4), floats(numbers[1] + row * size * 4), size)


_ROWS = kernel(_rows)


def silu_and_mul_rows(x: Tensor) -> Tensor:
    rows, width = x.shape
    if not 0 < rows < ROWS_LIMIT or not x.is_contiguous():
        return silu_and_mul.meaning(x)
    out = torch.empty(rows, width // 2)
    threads = torch.get_num_threads() if rows >= 4 else 1
    launch(_ROWS, threads, x.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


IMPL = Impl(silu_and_mul, "numba", silu_and_mul_rows, refuses_but_fp32)

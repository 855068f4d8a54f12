"""The two fp8 forms of 4 exponent bits: OCP's e4m3fn of checkpoints, and e4m3fnuz, the one that gfx942 computes in.

The same byte means half as much in fnuz (its exponent bias is one more), and the byte of OCP's -0 is fnuz's NaN.
Callers: weight formats at load; cases of ops, which run in the device's own form.
"""

from functools import cache

import torch
from torch import Tensor

from services.worker.kernels.gpu_arch import arch_of

FNUZ_ARCHS = ("gfx940", "gfx941", "gfx942")
NEGATIVE_ZERO = -128  # its byte as int8


def fp8_of(arch: str) -> torch.dtype:
    """The fp8 that this GPU multiplies. arch: as in kernels.registry.Facts."""
    return torch.float8_e4m3fnuz if arch in FNUZ_ARCHS else torch.float8_e4m3fn


@cache
def native_fp8() -> torch.dtype:
    """fp8_of the GPU in use; OCP's without one."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return torch.float8_e4m3fn
    return fp8_of(arch_of(torch.device("cuda")))


def to_fnuz(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers for gfx942: bytes kept, -0 made 0, scales doubled. New tensors.

    values: float8_e4m3fn, any shape, no NaN (a NaN's byte would become a number); scale: what values are multiplied by.
    """
    bits = values.contiguous().view(torch.int8)
    return bits.masked_fill(bits == NEGATIVE_ZERO, 0).view(torch.float8_e4m3fnuz), scale * 2.0


def to_ocp(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: bytes kept, scales halved."""
    return values.contiguous().view(torch.float8_e4m3fn), scale * 0.5

"""A whole weight of 8 or 4 bits in 16, for many rows: once is cheaper than anew for each block of rows.

It moves at most 5 bytes a number, which a product with 200 rows outweighs on an H200; the product is torch's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, options, release, wait
from services.worker.kernels.impl.triton._narrow import column, power, row_start, scale_column, scale_start

BLOCK_N, BLOCK_K = 4, 512


@triton.jit(do_not_specialize=["N"])
def widen_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [N, K] = the weight, see `_narrow`. Grid: (blocks of rows, blocks of columns)."""
    PACKED: tl.constexpr = 2 if FORM == "mxfp4" or FORM == "int4" else 1
    release(PDL)
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    stored = tl.program_id(1) * (BLOCK_K // PACKED) + tl.arange(0, BLOCK_K // PACKED)
    places = row_start(rows, K, FORM, TILED)[:, None] + column(stored, TILED)[None, :]
    numbers = tl.load(weight_ptr + places, mask=(rows < N)[:, None] & (stored < K // PACKED)[None, :], other=0.0)
    if PACKED == 2:
        numbers = tl.reshape(tl.join(numbers & 15, numbers >> 4), [BLOCK_N, BLOCK_K]).to(tl.int32)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    places = scale_start(rows, 0, K, FORM, GROUP, ROW_SCALE, TILED)[:, None]
    places = places + (0 if FORM == "rows" else scale_column(cols, FORM, GROUP, TILED)[None, :])
    scales = tl.load(scales_ptr + places, mask=inside, other=0.0)
    if FORM == "mxfp4":
        # as the float that it nearly is
        bits = ((numbers & 8) << 28) | ((numbers & 7) << 22)
        wide = bits.to(tl.float32, bitcast=True) * 2.0**126
    else:
        wide = numbers.to(tl.float32)
        if zeros_ptr is not None:
            wide -= tl.load(zeros_ptr + places, mask=inside, other=0.0).to(tl.float32)
        elif FORM == "int4":
            wide -= 8.0
    wide *= power(scales) if FORM == "mxfp4" or FORM == "mxfp8" else scales.to(tl.float32)
    wait(PDL)
    tl.store(out_ptr + rows[:, None] * K + cols[None, :], wide.to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    form: str,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    row_scale: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The matrix [N, K] of `dtype` that a weight stands for (`_narrow_plan.Narrow`)."""
    outputs, inner = shape
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    widen_kernel[triton.cdiv(outputs, BLOCK_N), triton.cdiv(inner, BLOCK_K)](
        weight, scales, zeros, out, outputs, K=inner, FORM=form, GROUP=group, ROW_SCALE=row_scale,
        TILED=weight.dim() > 3, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, **options(weight.device),
    )  # fmt: skip
    return out


def aot_case(like: AotCase) -> AotCase:
    """For the weight that another case has."""
    names = ("weight_ptr", "scales_ptr", "zeros_ptr", "out_ptr", "N", "K", "FORM", "GROUP", "ROW_SCALE", "TILED", "PDL")
    signature = {name: like.signature[name] for name in names} | {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
    return AotCase("", widen_kernel, signature, 4, 1)

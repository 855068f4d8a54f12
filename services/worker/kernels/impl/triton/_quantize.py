"""Activations to 8 and 4 bits, with what comes before them in a layer: residual add, RMS norm, the gate of an MLP.

One kernel for rows and groups: a program has a whole row where something needs it (its norm, its own scale), else a run
of groups. One scale for a whole step takes two launches: each program's largest number, then all of them everywhere.
Numbers are divided by their scales in fp32 and rounded to nearest even, as in the ops' meaning.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._gate import activated
from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait
from services.worker.kernels.ops.quantize_rows import SMALLEST, limit_of
from services.worker.kernels.packing.mx import GROUP, LARGEST, PADDED_COLUMNS, PADDED_ROWS

TILE = 2048  # numbers of a program that needs no whole row
MOST_PARTS = 1024  # programs that look for a step's largest number
FLOOR = tl.constexpr(SMALLEST)


@triton.jit
def _stored(scaled, LIMIT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to `dtype`, to nearest even, within LIMIT."""
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    if dtype == tl.int8:
        # beyond 2^23 fp32 has whole numbers only: the sum rounds
        return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return scaled.to(dtype)


@triton.jit
def _largest(wide, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.max(tl.abs(wide), axis), FLOOR)


@triton.jit
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    scales_ptr,
    total_ptr,
    eps,
    T,
    stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N], scales [T, N / width] or its transpose, width = min(GROUP, N). Grid: (T, blocks of GROUPS groups).

    x: rows of N numbers (2 N with GATE: silu of the first half times the second), `stride` apart; residual, total:
    [T, N], total = x + residual is what goes on; norm: [N], needs all of a row in one program. None: not wanted.
    """
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = cols < N
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=inside, other=0.0)
    if GATE:
        up = tl.load(x_ptr + row * stride + N + cols, mask=inside, other=0.0)
        # rounded before and after the product, as in the op's meaning
        x = activated(x.to(tl.float32), "silu").to(x.dtype) * up
    if residual_ptr is not None:
        x = x + tl.load(residual_ptr + row * N + cols, mask=inside, other=0.0)
        tl.store(total_ptr + row * N + cols, x, mask=inside)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / N + eps)
        x = (wide * scale).to(x.dtype) * weight
    wide = x.to(tl.float32)
    scales = _largest(wide, 1) / LIMIT
    tl.store(out_ptr + row * N + cols, _stored(wide / scales[:, None], LIMIT, out_ptr.dtype.element_ty), mask=inside)
    width: tl.constexpr = (N + GROUP - 1) // GROUP
    places = groups.to(tl.int64) * T + row if BY_COLUMN else row * width + groups
    tl.store(scales_ptr + places, scales, mask=groups < width)


@triton.jit(do_not_specialize=["count"])
def largest_kernel(x_ptr, parts_ptr, count, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """parts [programs]: the largest magnitude among STEPS * BLOCK of `count` numbers each."""
    release(PDL)
    wait(PDL)
    largest = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * STEPS * BLOCK + tl.arange(0, BLOCK)
    for step in range(STEPS):
        places = start + step * BLOCK
        largest = tl.maximum(largest, tl.abs(tl.load(x_ptr + places, mask=places < count, other=0.0).to(tl.float32)))
    tl.store(parts_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["count", "num_parts"])
def tensor_kernel(  # type: ignore[no-untyped-def]
    x_ptr, parts_ptr, out_ptr, scale_ptr, count, num_parts,
    PARTS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: `count` numbers by the scale that the largest of all parts asks for; scale: [1]."""
    release(PDL)
    part = tl.arange(0, PARTS)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    x = tl.load(x_ptr + places, mask=places < count, other=0.0).to(tl.float32)
    scale = _largest(tl.load(parts_ptr + part, mask=part < num_parts, other=0.0), 0) / LIMIT
    tl.store(out_ptr + places, _stored(x / scale, LIMIT, out_ptr.dtype.element_ty), mask=places < count)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)


@triton.jit
def _e2m1(scaled):  # type: ignore[no-untyped-def]
    """The four bits of fp32 numbers, int32: a tie between two goes to the even one, beyond 6 to 6."""
    size = tl.abs(scaled)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((scaled.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit(do_not_specialize=["T"])
def mx_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, scales_ptr, T, stride,
    N: tl.constexpr, LARGEST: tl.constexpr, FOUR_BITS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Groups of 32 under the least power of two that leaves nothing above LARGEST. Grid: blocks of GROUPS, by row.

    out: fp8 [T, N] and scales uint8 [T, N / 32]; FOUR_BITS: uint8 [T, N / 2] and tiles of packing.mx.tile_scales.
    """
    release(PDL)
    flat = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row = flat // (N // 32)
    group = (flat % (N // 32)).to(tl.int32)
    inside = row < T
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    wait(PDL)
    wide = tl.load(x_ptr + row[:, None] * stride + cols, mask=inside[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    # the exponent of largest / LARGEST, one more if it has a mantissa
    bits = tl.div_rn(largest, tl.full([GROUPS], LARGEST, tl.float32)).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    above = tl.where(exponent == 0, (bits > 0x400000).to(tl.int32), ((bits & 0x7FFFFF) != 0).to(tl.int32))
    scale = tl.where(largest == 0.0, 126, tl.minimum(exponent + above, 254))
    # 2 ** (127 - scale); that of 254 is subnormal
    inverse = tl.where(scale == 254, 0x400000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = wide * inverse[:, None]
    if FOUR_BITS:
        low, high = tl.split(tl.reshape(_e2m1(scaled), [GROUPS, 16, 2]))
        places = flat[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + places, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
        columns: tl.constexpr = (N // 32 + 7) // 8 * 8
        tile = row // 32 * (32 * columns) + row % 16 * 4 + row % 32 // 16
        tl.store(scales_ptr + tile + scale_columns(group), scale.to(tl.uint8), mask=inside)
    else:
        numbers = _stored(scaled, LARGEST, out_ptr.dtype.element_ty)
        tl.store(out_ptr + flat[:, None] * 32 + tl.arange(0, 32)[None, :], numbers, mask=inside[:, None])
        tl.store(scales_ptr + flat, scale.to(tl.uint8), mask=inside)


@triton.jit
def scale_columns(group):  # type: ignore[no-untyped-def]
    """Where scale `group` of a row lies from the row's first one, in tiles of packing.mx.tile_scales."""
    return group // 8 * 256 + group % 4 * 64 + group % 8 // 4 * 2


@cache
def geometry(width: int, group: int, whole: bool) -> tuple[int, int, int]:
    """GROUP, GROUPS, warps. `group` 0: all of a row; `whole`: a program has one."""
    if group == 0:
        block = triton.next_power_of_2(width)
        return block, 1, max(1, min(16, block // 512))
    groups = triton.next_power_of_2(width // group)
    if not whole:
        groups = min(groups, TILE // group)
    return group, groups, max(1, min(16, groups * group // 512))


def launch(
    x: Tensor,
    dtype: torch.dtype,
    group: int = 0,
    by_column: bool = False,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [T, N], scales [T, N / group], its transpose `by_column`, or [T, 1] for group 0; x + residual."""
    rows, width = x.shape[0], x.shape[1] // (2 if gate else 1)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    count = width // group if group else 1
    scales = torch.empty((count, rows) if by_column else (rows, count), dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        weight, eps = (None, 0.0) if norm is None else norm
        width_of, groups, warps = geometry(width, group, norm is not None)
        quantize_kernel[rows, triton.cdiv(count, groups)](
            x, None if residual is None else residual.contiguous(), weight, out, scales,
            None if residual is None else total, eps, rows, x.stride(0), width, width_of, groups, by_column, gate,
            limit_of(dtype), num_warps=warps, num_stages=1, **options(x.device),
        )  # fmt: skip
    return out, scales, total


def launch_tensor(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    count, block = x.numel(), TILE
    steps = max(1, triton.next_power_of_2(triton.cdiv(count, block * MOST_PARTS)))
    num_parts = triton.cdiv(count, block * steps)
    parts = torch.empty(num_parts, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    launches: dict[str, Any] = {"num_warps": 4, "num_stages": 1, **options(x.device)}
    largest_kernel[(num_parts,)](x, parts, count, block, steps, **launches)
    tensor_kernel[(triton.cdiv(count, block),)](
        x, parts, out, scale, count, num_parts, MOST_PARTS, limit_of(dtype), block, **launches
    )
    return out, scale


def launch_mx(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """MXFP8 of `dtype`; None: MXFP4, with its scales in tiles."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    groups = width // GROUP
    if dtype is None:
        out = torch.empty((rows, width // 2), dtype=torch.uint8, device=x.device)
        tiles = triton.cdiv(rows, PADDED_ROWS) * (PADDED_ROWS // 32), triton.cdiv(groups, PADDED_COLUMNS)
        scales = torch.empty((*tiles, 4, 16, 2, 2), dtype=torch.uint8, device=x.device)
    else:
        out = torch.empty((rows, width), dtype=dtype, device=x.device)
        scales = torch.empty((rows, groups), dtype=torch.uint8, device=x.device)
    if rows:
        block = TILE // GROUP if x.device.type == "cuda" else TILE  # interpreted, few large programs
        mx_kernel[(triton.cdiv(rows * groups, block),)](
            x, out, scales, rows, x.stride(0), width, LARGEST if dtype is None else limit_of(dtype), dtype is None,
            block, num_warps=4, num_stages=1, **options(x.device),
        )  # fmt: skip
    return out, scales


def aot_case(
    name: str, width: int, group: int = 0, norm: bool = False, add: bool = False, gate: bool = False
) -> AotCase:
    width_of, groups, warps = geometry(width, group, norm)
    signature: dict[str, Constant] = {
        "x_ptr": "*bf16:16",
        "residual_ptr": "*bf16:16" if add else None,
        "norm_ptr": "*bf16:16" if norm else None,
        "out_ptr": "*fp8e4nv:16",
        "scales_ptr": "*fp32:16",
        "total_ptr": "*bf16:16" if add else None,
        "eps": "fp32",
        "T": "i32",
        "stride": "i32:16",
        "N": width,
        "GROUP": width_of,
        "GROUPS": groups,
        "BY_COLUMN": False,
        "GATE": gate,
        "LIMIT": 448.0,
        "PDL": False,
    }
    return AotCase(f"{name}_{width}", quantize_kernel, signature, warps, 1)


def aot_tensor() -> tuple[AotCase, ...]:
    """Both kernels of `launch_tensor`."""
    signature: dict[str, Constant] = {"x_ptr": "*bf16:16", "parts_ptr": "*fp32:16", "count": "i32", "PDL": False}
    signature |= {"BLOCK": TILE, "STEPS": 1, "out_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "num_parts": "i32"}
    signature |= {"PARTS": MOST_PARTS, "LIMIT": 448.0}
    return tuple(
        AotCase(name, kernel, {key: signature[key] for key in kernel.arg_names}, 4, 1)
        for name, kernel in (("largest", largest_kernel), ("by_largest", tensor_kernel))
    )


def aot_mx(width: int, four_bits: bool) -> AotCase:
    signature: dict[str, Constant] = {"x_ptr": "*bf16:16", "out_ptr": "*u8:16" if four_bits else "*fp8e4nv:16"}
    signature |= {"scales_ptr": "*u8:16", "T": "i32", "stride": "i32:16", "N": width, "PDL": False}
    signature |= {"LARGEST": LARGEST if four_bits else 448.0, "FOUR_BITS": four_bits, "GROUPS": TILE // GROUP}
    return AotCase(f"rows_{width}", mx_kernel, signature, 4, 1)

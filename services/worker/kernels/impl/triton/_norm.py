"""RMS normalization of rows in one pass, with or without a residual: short rows several to a program."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait

TILE = 2048  # numbers per program, at least


@triton.jit(do_not_specialize=["T"])
def norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    T,
    stride_t,
    H: tl.constexpr,
    STRIDE_H: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = rms_norm(x); with ADD total = x + residual, out = rms_norm(total).

    x: [T, H, N] in strides (stride_t, STRIDE_H, 1); weight: [N]; residual, out, total: [T * H, N], contiguous.
    """
    release(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    mask = (rows < T * H)[:, None] & (cols < N)[None, :]
    # rows of x may lie apart (heads within a fused projection)
    starts = (rows // H).to(tl.int64) * stride_t + rows % H * STRIDE_H
    places = rows.to(tl.int64)[:, None] * N + cols[None, :]
    wait(PDL)
    x = tl.load(x_ptr + starts[:, None] + cols[None, :], mask=mask, other=0.0)
    if ADD:
        x = x + tl.load(residual_ptr + places, mask=mask, other=0.0)
        tl.store(total_ptr + places, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / N + eps)
    # rounded before the weight, as in the op's meaning
    scaled = (wide * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, scaled * weight[None, :], mask=mask)


@cache
def geometry(rows: int, width: int) -> tuple[int, int, int]:
    """ROWS, BLOCK, warps; `rows` is 1 for few: then a program has one row, so that all processors have one."""
    block = triton.next_power_of_2(width)
    per_program = 1 if rows == 1 else max(1, TILE // block)
    return per_program, block, max(1, min(16, per_program * block // 512))


def launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """The normed tensor, and x + residual if there is a residual. x: [..., N]; weight: [N]."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = out.numel() // width
    if count == 0:
        return out, total
    if x.dim() == 3 and x.stride(2) == 1:
        heads, stride_t, stride_h = x.shape[1], x.stride(0), x.stride(1)
    elif x.dim() == 2 and x.stride(1) == 1:
        heads, stride_t, stride_h = 1, x.stride(0), 0
    else:
        x, heads, stride_t, stride_h = x.contiguous(), 1, width, 0
    residual = None if residual is None else residual.contiguous()
    rows, block, warps = geometry(1 if count <= 1024 else 2, width)
    norm_kernel[((count + rows - 1) // rows,)](
        x, residual, weight, out, total, eps, count // heads, stride_t, heads, stride_h, width, residual is not None,
        rows, block, num_warps=warps, num_stages=1, **options(x.device),
    )  # fmt: skip
    return out, total


def aot_case(name: str, count: int, width: int, add: bool, hot: bool = True) -> AotCase:
    rows, block, warps = geometry(count, width)
    signature: dict[str, Constant] = {
        "x_ptr": "*bf16:16",
        "residual_ptr": "*bf16:16" if add else None,
        "weight_ptr": "*bf16:16",
        "out_ptr": "*bf16:16",
        "total_ptr": "*bf16:16" if add else None,
        "eps": "fp32",
        "T": "i32",
        "stride_t": "i32:16",
        "H": 1,
        "STRIDE_H": 0,
        "N": width,
        "ADD": add,
        "ROWS": rows,
        "BLOCK": block,
        "PDL": False,
    }
    return AotCase(f"{name}_{count}x{width}", norm_kernel, signature, warps, 1, hot)

"""One program takes some heads of one token or of several: the norm, and the gate from its place in the projection."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.gated_rms_norm import gated_rms_norm
from services.worker.kernels.registry import Impl

TILE = 1024  # numbers of a program


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_rows,
    stride_t,
    STRIDE_K: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, out: [num_rows, D], HEADS rows a token; gate: [T, HEADS / SHARE, SHARE * D] by strides (_t, _K)."""
    release(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    heads = rows % HEADS
    gates = (rows // HEADS).to(tl.int64) * stride_t + heads // SHARE * STRIDE_K + heads % SHARE * D
    wait(PDL)
    places = rows.to(tl.int64)[:, None] * D + cols[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gates[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    # rounded before the weight and before the gate, as in the op's meaning
    scaled = (x * scale[:, None]).to(out_ptr.dtype.element_ty) * weight[None, :]
    result = scaled.to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _sizes(groups: int, heads: int, width: int, few: bool) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {
        "HEADS": heads,
        "SHARE": heads // groups,
        "D": width,
        "ROWS": 1 if few else max(1, TILE // block),
        "BLOCK": block,
    }


def gated_rms_norm_by_heads(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        norm_into(out, x, gate, weight, eps)
    return out


def norm_into(out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """`out`: as x, or x itself; at least one token."""
    num_tokens, heads, width = x.shape
    count = num_tokens * heads
    sizes = _sizes(gate.shape[1], heads, width, count <= 1024)
    gated_norm_kernel[(triton.cdiv(count, sizes["ROWS"]),)](
        x, gate, weight, out, eps, count, gate.stride(0), STRIDE_K=gate.stride(1), num_warps=1 if count <= 1024 else 4,
        **sizes, **options(x.device),
    )  # fmt: skip


IMPL = Impl(gated_rms_norm, "triton", gated_rms_norm_by_heads, needs_gpu)


def _aot(name: str, few: bool) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(("x_ptr", "gate_ptr", "weight_ptr", "out_ptr"), "*bf16:16")
    signature |= {"eps": "fp32", "num_rows": "i32", "stride_t": "i32:16", "STRIDE_K": 768, "PDL": False}
    signature |= _sizes(16, 32, 128, few)
    return AotCase(name, gated_norm_kernel, signature, num_warps=1 if few else 4)


AOT = (_aot("32x128_few", True), _aot("32x128", False))

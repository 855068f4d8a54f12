"""One program turns some heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._rotary import load_angles, rotate
from services.worker.kernels.ops.rope import rope
from services.worker.kernels.registry import Impl

TILE = 1024  # numbers of a program


@triton.jit
def _rope(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_stride_t,
    x_stride_h,
    cos_stride_t,
    sin_stride_t,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [T, NUM_HEADS, HEAD_DIM] by its strides; cos, sin: [T, 2 * HALF]; out: [T, NUM_HEADS, HEAD_DIM]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = heads[:, None] < NUM_HEADS
    offsets = tl.arange(0, HALF_PADDED)
    inside = offsets < HALF
    mask = here & inside[None, :]
    release(PDL)
    wait(PDL)
    x_ptr += token * x_stride_t + heads[:, None] * x_stride_h
    out_ptr += (token * NUM_HEADS + heads[:, None]) * HEAD_DIM
    low = tl.load(x_ptr + offsets[None, :], mask=mask, other=0.0)
    high = tl.load(x_ptr + HALF + offsets[None, :], mask=mask, other=0.0)
    cos_low, cos_high, sin_low, sin_high = load_angles(
        cos_ptr + token * cos_stride_t, sin_ptr + token * sin_stride_t, offsets, inside, HALF
    )
    low, high = rotate(low.to(tl.float32), high.to(tl.float32), cos_low, cos_high, sin_low, sin_high)
    tl.store(out_ptr + offsets[None, :], low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + HALF + offsets[None, :], high.to(out_ptr.dtype.element_ty), mask=mask)
    if REST_PADDED > 0:
        rest = 2 * HALF + tl.arange(0, REST_PADDED)
        mask = here & (rest < HEAD_DIM)[None, :]
        tl.store(out_ptr + rest[None, :], tl.load(x_ptr + rest[None, :], mask=mask), mask=mask)


def rope_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    half, rest = cos.shape[-1] // 2, head_dim - cos.shape[-1]
    heads = max(1, min(TILE // head_dim, triton.next_power_of_2(num_heads)))
    heads = 1 << heads.bit_length() - 1
    _rope[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS=heads,
        HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(rest) if rest else 0,
        num_warps=1,
        **options(x.device),
    )
    return out


IMPL = Impl(rope, "triton", rope_heads, needs_gpu)

_SIGNATURE: dict[str, Constant] = {
    "x_ptr": "*bf16:16",
    "cos_ptr": "*bf16:16",
    "sin_ptr": "*bf16:16",
    "out_ptr": "*bf16:16",
    "x_stride_t": "i32:16",
    "x_stride_h": "i32:16",
    "cos_stride_t": "i32:16",
    "sin_stride_t": "i32:16",
    "NUM_HEADS": 24,
    "HEAD_DIM": 128,
    "HALF": 64,
    "HEADS": 8,
    "HALF_PADDED": 64,
    "REST_PADDED": 0,
    "PDL": False,
}
AOT = (AotCase("24x128", _rope, _SIGNATURE, num_warps=1, hot=False),)

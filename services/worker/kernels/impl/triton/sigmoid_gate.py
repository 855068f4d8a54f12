"""One program takes a run of one token's numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.sigmoid_gate import sigmoid_gate
from services.worker.kernels.registry import Impl

TILE = 1024


@triton.jit
def sigmoid_gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    out_ptr,
    stride_t,
    STRIDE_H: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, out: [T, WIDTH]; gate: [T, WIDTH / D, D] in strides (stride_t, STRIDE_H, 1)."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    wait(PDL)
    x = tl.load(x_ptr + token * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    places = token * stride_t + cols // D * STRIDE_H + cols % D
    gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * WIDTH + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


def sigmoid_gate_by_blocks(x: Tensor, gate: Tensor) -> Tensor:
    num_tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    width = heads * head_dim
    block = min(TILE, triton.next_power_of_2(width))
    sigmoid_gate_kernel[(num_tokens, triton.cdiv(width, block))](
        x, gate, out, gate.stride(0), STRIDE_H=gate.stride(1), WIDTH=width, D=head_dim, BLOCK=block, num_warps=4,
        **options(x.device),
    )  # fmt: skip
    return out


IMPL = Impl(sigmoid_gate, "triton", sigmoid_gate_by_blocks, needs_gpu)


def _aot(name: str, heads: int, head_dim: int) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16:16")
    width = heads * head_dim
    signature |= {"stride_t": "i32:16", "STRIDE_H": 2 * head_dim}
    signature |= {"WIDTH": width, "D": head_dim, "BLOCK": min(TILE, width), "PDL": False}
    return AotCase(name, sigmoid_gate_kernel, signature)


AOT = (_aot("16x256", 16, 256),)

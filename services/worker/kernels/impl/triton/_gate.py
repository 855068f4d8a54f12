"""The gate of a gated MLP: activation(gate) * up, alone or at the end of a product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, options, release, wait

BLOCK = 1024


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu or the tanh form of gelu, fp32. tanh(a) = 2 * sigmoid(2a) - 1, so gelu_tanh(g) = g * sigmoid(2a)."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def expert_gate(gate, up, CLAMPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up, or the clamped_swiglu of the op moe_clamped, fp32."""
    if CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = activation(x[:, :WIDTH]) * x[:, WIDTH:]. x: [T, 2 * WIDTH], rows `stride` apart; out: [T, WIDTH]."""
    release(PDL)
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    wait(PDL)
    gate = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * stride + WIDTH + cols, mask=mask, other=0.0)
    # rounded before the product, as in the op's meaning
    gate = activated(gate.to(tl.float32), ACTIVATION).to(up.dtype)
    tl.store(out_ptr + row * WIDTH + cols, gate * up, mask=mask)


def launch(x: Tensor, activation: str) -> Tensor:
    """x: [T, 2I]; returns a new [T, I]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        if x.stride(1) != 1:
            x = x.contiguous()
        gate_kernel[(rows * ((width + BLOCK - 1) // BLOCK),)](
            x, out, x.stride(0), width, activation, BLOCK, num_warps=4, **options(x.device)
        )
    return out


def aot_cases(name: str, activation: str) -> tuple[AotCase, ...]:
    cases = []
    for width in (3072, 14336):
        signature: dict[str, Constant] = {
            "x_ptr": "*bf16:16",
            "out_ptr": "*bf16:16",
            "stride": "i32:16",
            "WIDTH": width,
            "ACTIVATION": activation,
            "BLOCK": BLOCK,
            "PDL": False,
        }
        cases.append(AotCase(f"{name}_{width}", gate_kernel, signature, 4))
    return tuple(cases)

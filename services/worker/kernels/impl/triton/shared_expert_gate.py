"""One program takes a run of one token's numbers, and makes the token's own gate for itself: a sum over its row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.ops.shared_expert_gate import shared_expert_gate
from services.worker.kernels.registry import Impl

BLOCK = 1024  # numbers of a program
STRETCH = 2048  # of the row, at a time


@triton.jit
def shared_expert_gate_kernel(  # type: ignore[no-untyped-def]
    halves_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """halves: [T, 2 * WIDTH]; x: [T, N]; weight: [N]; out: [T, WIDTH]."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols, places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STRETCH)
    weight = tl.load(weight_ptr + places, mask=places < N, other=0.0).to(tl.float32)
    wait(PDL)
    gate = tl.load(halves_ptr + token * 2 * WIDTH + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(halves_ptr + token * 2 * WIDTH + WIDTH + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    sums = weight * tl.load(x_ptr + token * N + places, mask=places < N, other=0.0).to(tl.float32)
    for start in tl.static_range(STRETCH, N, STRETCH):
        inside = start + places < N
        weight = tl.load(weight_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        sums += weight * tl.load(x_ptr + token * N + start + places, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up * tl.sigmoid(tl.sum(sums, 0))
    tl.store(out_ptr + token * WIDTH + cols, result.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


def shared_expert_gate_by_rows(halves: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    num_tokens, width = len(halves), halves.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=halves.dtype, device=halves.device)
    if num_tokens:
        sizes = _sizes(width, x.shape[1])
        grid = num_tokens, triton.cdiv(width, sizes["BLOCK"])
        shared_expert_gate_kernel[grid](halves, x, weight, out, **sizes, num_warps=4, **options(x.device))
    return out


def _sizes(width: int, hidden: int) -> dict[str, int]:
    return {
        "WIDTH": width,
        "N": hidden,
        "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
        "STRETCH": min(STRETCH, triton.next_power_of_2(hidden)),
    }


IMPL = Impl(shared_expert_gate, "triton", shared_expert_gate_by_rows, needs_gpu)


def _aot(width: int, hidden: int) -> AotCase:
    signature: dict[str, Constant] = dict.fromkeys(("halves_ptr", "x_ptr", "weight_ptr", "out_ptr"), "*bf16:16")
    return AotCase(f"{width}_{hidden}", shared_expert_gate_kernel, signature | _sizes(width, hidden) | {"PDL": False})


AOT = (_aot(512, 2048),)

"""x as products with words of four bits take it: by planes, so that no number of x crosses threads there.

A word of 16 bits has four columns, and a matrix unit takes the first of all words of a step, then the second ones, and
so on. Here each UNIT columns, a step's, are put into that order once, with the norm if there is one. Called by
`_narrow_plan`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, options, release, wait

THREAD = 16  # numbers


@triton.jit
def planes_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, out_ptr, eps, K: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = x, or rms_norm(x) with norm [K]: [T, K], of each UNIT columns, which divide K, every fourth one first, then
    every fourth from the second on, and so on. Grid: (T).
    """
    release(PDL)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    start = tl.program_id(0).to(tl.int64) * K
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + cols, mask=inside, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + start + cols, mask=inside, other=0.0)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
        x = scaled.to(x.dtype) * norm  # rounded before the weight, as in the op's meaning
    fours = tl.reshape(x, [BLOCK // UNIT, UNIT // 4, 4])
    tl.store(out_ptr + start + cols, tl.reshape(tl.permute(fours, (0, 2, 1)), [BLOCK]), mask=inside)


def _warps(block: int) -> int:
    return max(1, min(16, block // (32 * THREAD)))


def launch(x: Tensor, norm: tuple[Tensor, float] | None, unit: int) -> Tensor:
    """x [T, K], contiguous, and normed if `norm` has a weight [K] and an epsilon, by planes. T > 0."""
    (rows, inner), (weight, eps) = x.shape, norm or (None, 0.0)
    out, block = torch.empty_like(x), triton.next_power_of_2(inner)
    planes_kernel[(rows,)](
        x, weight, out, eps, inner, unit, block, num_warps=_warps(block), num_stages=1, **options(x.device)
    )
    return out


def aot_case(inner: int, unit: int, norm: bool) -> AotCase:
    block = triton.next_power_of_2(inner)
    pointer = "*bf16:16"
    signature = {
        "x_ptr": pointer, "norm_ptr": pointer if norm else None, "out_ptr": pointer, "eps": "fp32", "K": inner,
        "UNIT": unit, "BLOCK": block, "PDL": False,
    }  # fmt: skip
    return AotCase(f"planes_{inner}", planes_kernel, signature, _warps(block), 1)

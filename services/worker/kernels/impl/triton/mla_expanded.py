"""Un-absorbed latent attention of prompts: one program serves a block of tokens of one head, softmax online in base 2.

Keys are two parts, a head's own and the rotated one that all heads share, so that nothing is copied together. Keys that
every token of a block sees go through a loop without masks.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._decode_attention import LOG2E, small_lds
from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._prefill_attention import _find_row
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.registry import Impl


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc,  # float32 [BLOCK_M, BLOCK_V]
    peak,  # float32 [BLOCK_M]
    total,
    q,  # [BLOCK_M, BLOCK_N]
    q_rope,  # [BLOCK_M, BLOCK_R]
    position,  # int32 [BLOCK_M]
    low,
    high,  # no key from here on is read
    kv_ptr,  # at the row's first position and the head
    rope_ptr,
    kv_stride,
    rope_stride,
    factor,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys low .. high - 1."""
    n, r, v, tokens = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_KV)
    for start in range(low, high, BLOCK_KV):
        key = start + tokens
        place = key.to(tl.int64)
        if MASKED:
            # hidden keys are read from a place that is finite
            place = tl.minimum(place, high - 1)
        key_at = kv_ptr + (place * kv_stride)[:, None] + n[None, :]
        rope_at = rope_ptr + (place * rope_stride)[:, None] + r[None, :]
        value_at = kv_ptr + (place * kv_stride + NOPE)[:, None] + v[None, :]
        k = tl.load(key_at) if NOPE == BLOCK_N else tl.load(key_at, mask=(n < NOPE)[None, :], other=0.0)
        k_rope = tl.load(rope_at) if ROPE == BLOCK_R else tl.load(rope_at, mask=(r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        if MASKED:
            # scaled before: a product and a sum in one rounding would leave a rest of the constant, too large for exp2
            scores = tl.where(key[None, :] <= position[:, None], scores * factor, -1.0e30)
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(peak, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - higher[:, None])
        lowered = tl.exp2(peak - higher)
        peak = higher
        total = total * lowered + tl.sum(weights, 1)
        values = tl.load(value_at) if VALUE == BLOCK_V else tl.load(value_at, mask=(v < VALUE)[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), values, acc * lowered[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["starts_ptr", "kv_starts_ptr"])
def expanded_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, H, NOPE + ROPE]
    kv_ptr,  # [S, H, NOPE + VALUE], contiguous
    rope_ptr,  # [S, ROPE]
    out_ptr,  # [T, H, VALUE], contiguous
    starts_ptr,  # int32 [R + 1]
    kv_starts_ptr,  # int32 [R + 1]
    factor,
    num_rows,
    q_stride_t,
    q_stride_h,
    rope_stride,
    num_heads,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (H, T // BLOCK_M + R blocks of tokens)."""
    wait(PDL)
    release(PDL)
    head = tl.program_id(0)
    # the last blocks have the longest contexts of their rows
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _find_row(starts_ptr, block, 0, 0, num_rows, BLOCK_M)
    row_start = tl.load(starts_ptr + row)
    row_tokens = tl.load(starts_ptr + row + 1) - row_start
    first = (block - row_start // BLOCK_M - row) * BLOCK_M
    if first >= row_tokens:
        return
    kv_start = tl.load(kv_starts_ptr + row).to(tl.int64)
    context = tl.load(kv_starts_ptr + row + 1) - kv_start.to(tl.int32)
    m, n, r, v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    # rows beyond the end see what the last token sees and are not stored
    token = tl.minimum(first + m, row_tokens - 1)
    step_token = (row_start + token).to(tl.int64)
    q_ptr += (step_token * q_stride_t + head * q_stride_h)[:, None]
    q = tl.load(q_ptr + n[None, :], mask=(n < NOPE)[None, :], other=0.0)
    q_rope = tl.load(q_ptr + NOPE + r[None, :], mask=(r < ROPE)[None, :], other=0.0)
    position = context - row_tokens + token
    kv_stride = num_heads.to(tl.int64) * (NOPE + VALUE)
    kv_ptr += kv_start * kv_stride + head * (NOPE + VALUE)
    rope_ptr += kv_start * rope_stride
    seen = context - row_tokens + first
    full = (seen + 1) // BLOCK_KV * BLOCK_KV
    acc, peak, total = _attend(
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        tl.full([BLOCK_M], -1.0e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        q, q_rope, position, 0, full, kv_ptr, rope_ptr, kv_stride, rope_stride, factor,
        NOPE, ROPE, VALUE, BLOCK_N, BLOCK_R, BLOCK_V, BLOCK_KV, False,
    )  # fmt: skip
    acc, _, total = _attend(
        acc, peak, total,
        q, q_rope, position, full, tl.minimum(seen + BLOCK_M, context), kv_ptr, rope_ptr, kv_stride, rope_stride,
        factor, NOPE, ROPE, VALUE, BLOCK_N, BLOCK_R, BLOCK_V, BLOCK_KV, True,
    )  # fmt: skip
    at = out_ptr + ((step_token * num_heads + head) * VALUE)[:, None] + v[None, :]
    mask = (first + m < row_tokens)[:, None] & (v < VALUE)[None, :]
    tl.store(at, (acc * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


class Shape(NamedTuple):
    block_m: int
    block_kv: int
    num_warps: int
    num_stages: int


@cache
def shape_of(itemsize: int, value: int, is_small: bool) -> Shape:
    """Compiled without spills for all three targets; of small values tuned on an H200."""
    if itemsize > 2:
        return Shape(32, 16, 4, 1)
    if is_small:
        return Shape(128, 32, 4, 1) if value <= 128 else Shape(64, 32, 4, 1)
    return Shape(128, 64, 8, 3) if value <= 128 else Shape(64, 64, 8, 2)


def _sizes(nope: int, rope: int, value: int, shape: Shape) -> dict[str, int]:
    return {
        "NOPE": nope,
        "ROPE": rope,
        "VALUE": value,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": max(16, int(triton.next_power_of_2(nope))),
        "BLOCK_R": max(16, int(triton.next_power_of_2(rope))),
        "BLOCK_V": max(16, int(triton.next_power_of_2(value))),
        "BLOCK_KV": shape.block_kv,
    }


def run(
    q: Tensor, kv: Tensor, k_rope: Tensor, query_starts: Tensor, kv_starts: Tensor, max_query: int, scale: float
) -> Tensor:
    num_tokens, num_heads, width = q.shape
    rope = k_rope.shape[1]
    nope = width - rope
    value = kv.shape[2] - nope
    out = torch.empty((num_tokens, num_heads, value), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    shape = shape_of(q.element_size(), value, small_lds(q.device))
    num_rows = len(query_starts) - 1
    expanded_kernel[(num_heads, num_tokens // shape.block_m + num_rows)](
        q, kv, k_rope, out, query_starts, kv_starts, scale * LOG2E, num_rows,
        *q.stride()[:2], k_rope.stride(0), num_heads,
        **_sizes(nope, rope, value, shape), num_warps=shape.num_warps, num_stages=shape.num_stages,
        **options(q.device),
    )  # fmt: skip
    return out


IMPL = Impl(mla_expanded, "triton", run, needs_gpu)


def _aot(name: str, sizes: tuple[int, int, int], is_small: bool) -> AotCase:
    shape = shape_of(2, sizes[2], is_small)
    signature: dict[str, Constant] = dict.fromkeys(("q_ptr", "kv_ptr", "rope_ptr", "out_ptr"), "*bf16:16")
    signature |= {"starts_ptr": "*i32", "kv_starts_ptr": "*i32", "factor": "fp32", "num_rows": "i32", "PDL": False}
    signature |= dict.fromkeys(("q_stride_t", "q_stride_h", "rope_stride", "num_heads"), "i32:16")
    signature |= _sizes(*sizes, shape)
    targets = ("gfx942", "gfx950") if is_small else ("sm_90",)
    name = f"{name}_{'amd' if is_small else 'nvidia'}"
    return AotCase(name, expanded_kernel, signature, shape.num_warps, shape.num_stages, hot=False, targets=targets)


AOT = tuple(
    _aot(name, sizes, is_small)
    for name, sizes in (("deepseek_v3", (128, 64, 128)), ("glm_5", (192, 64, 256)))
    for is_small in (True, False)
)

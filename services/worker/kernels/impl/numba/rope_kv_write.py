"""Reads the projection once: turned queries to a new tensor, turned keys and plain values straight into their pages."""

from typing import Any

import torch
from numba import njit, types
from torch import Tensor

from services.worker.kernels.impl.numba._team import (
    as_float,
    float_bits,
    floats,
    int64s,
    kernel,
    launch,
    refuses_but_fp32,
)
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.rope_kv_write import HeadNorm, rope_kv_write
from services.worker.kernels.registry import Facts, Impl

TEAM_NUMBERS = 1 << 15  # fewer in the projection take less time than it takes to start a team of threads


@njit(fastmath={"reassoc", "contract", "nsz"})
def _norm(x: Any, weight: Any, out: Any, size: int, eps: Any) -> None:
    squares = types.float32(0.0)
    for i in range(size):
        squares += x[i] * x[i]
    factor = types.float32(1.0) / types.float32((squares / types.float32(size) + eps) ** types.float32(0.5))
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@njit(fastmath={"contract"})
def _turn(x: Any, cos: Any, sin: Any, out: Any, rotary: int, size: int) -> None:
    """`out` may be `x`."""
    half = rotary // 2
    for i in range(half):
        low, high = x[i], x[half + i]
        out[i] = low * cos[i] + high * sin[i]
        out[half + i] = high * cos[half + i] + low * sin[half + i]
    for i in range(rotary, size):
        out[i] = x[i]


def _rows(numbers: Any, thread: int, threads: int) -> None:
    mask = types.int64(0xFFFFFFFF)
    tokens, size, rotary = numbers[7], numbers[9] >> 32, numbers[9] & mask
    heads, kv_heads = numbers[8] >> 32, numbers[8] & mask
    cos_stride, sin_stride, eps = numbers[10] >> 32, numbers[10] & mask, as_float(types.int32(numbers[13]))
    slots = int64s(numbers[5])
    for token in range(thread, tokens, threads):
        source = numbers[0] + token * (heads + 2 * kv_heads) * size * 4
        cos, sin = floats(numbers[1] + token * cos_stride * 4), floats(numbers[2] + token * sin_stride * 4)
        page = slots[token] * kv_heads * size * 4
        for head in range(heads + kv_heads):
            is_key = head >= heads
            target = numbers[6] + (token * heads + head) * size * 4
            weight = numbers[11]
            if is_key:
                target, weight = numbers[3] + page + (head - heads) * size * 4, numbers[12]
            x, out = floats(source + head * size * 4), floats(target)
            if weight != 0:
                _norm(x, floats(weight), out, size, eps)
                x = out
            _turn(x, cos, sin, out, rotary, size)
        values, kept = floats(source + (heads + kv_heads) * size * 4), floats(numbers[4] + page)
        for i in range(kv_heads * size):
            kept[i] = values[i]


_ROWS = kernel(_rows)


def rope_kv_write_rows(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    kv_scale: KvScale | None,
) -> Tensor:
    tokens, width = qkv.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    q = torch.empty(tokens, num_heads, head_dim)
    norm = (0, 0, 0)
    if head_norm is not None:
        norm = head_norm.q.data_ptr(), head_norm.k.data_ptr(), float_bits(head_norm.eps)
    launch(
        _ROWS,
        torch.get_num_threads() if qkv.numel() >= TEAM_NUMBERS else 1,
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        q.data_ptr(),
        tokens,
        num_heads << 32 | num_kv_heads,
        head_dim << 32 | cos.shape[-1],
        cos.stride(0) << 32 | sin.stride(0),
        *norm,
    )
    return q


def refuses(facts: Facts) -> str | None:
    unable = next((name for name in ("kv_fp8", "own_values") if facts.shapes.get(name)), None)
    return refuses_but_fp32(facts) if unable is None else f"does not do {unable}"


IMPL = Impl(rope_kv_write, "numba", rope_kv_write_rows, refuses)

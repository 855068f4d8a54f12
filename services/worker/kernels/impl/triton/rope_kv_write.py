"""One program takes some heads of one token, all queries, all keys or all values: norm, rotation, and their place."""

from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, release, wait
from services.worker.kernels.impl.triton._rotary import limit_of, load_angles, own_scale, rotate, scaled, stored
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.rope_kv_write import HeadNorm, rope_kv_write
from services.worker.kernels.registry import Impl

TILE = 1024  # numbers of a program


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    low, high, rest, cache_ptr, scale_ptr, head, lows, mask, rests, rest_mask, dtype: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, REST_PADDED: tl.constexpr, LIMIT: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Heads `head` .. head + HEADS, counted from the cache's first, at cache_ptr; with EACH also their scales."""
    if EACH:
        # rounded before the largest is sought, as in the op's meaning
        low, high, rest = low.to(dtype), high.to(dtype), rest.to(dtype)
        largest = tl.max(tl.maximum(tl.abs(low.to(tl.float32)), tl.abs(high.to(tl.float32))), 1)
        if REST_PADDED > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), 1))
        own = tl.arange(0, HEADS)
        scale = own_scale(largest, scale_ptr + head + own, own < HEADS, LIMIT)
        tl.store(cache_ptr + lows, scaled(low, cache_ptr, scale, LIMIT), mask=mask)
        tl.store(cache_ptr + HALF + lows, scaled(high, cache_ptr, scale, LIMIT), mask=mask)
        if REST_PADDED > 0:
            tl.store(cache_ptr + rests, scaled(rest, cache_ptr, scale, LIMIT), mask=rest_mask)
    else:
        tl.store(cache_ptr + lows, stored(low, cache_ptr, scale_ptr, LIMIT), mask=mask)
        tl.store(cache_ptr + HALF + lows, stored(high, cache_ptr, scale_ptr, LIMIT), mask=mask)
        if REST_PADDED > 0:
            tl.store(cache_ptr + rests, stored(rest, cache_ptr, scale_ptr, LIMIT), mask=rest_mask)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rope_kv_write(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_ptr,
    eps,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """qkv: [T, (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + NUM_KV_HEADS * VALUE_DIM]; cos, sin: [T, 2 * HALF] by their
    strides; slots: int64 [T]. Caches: [slots, NUM_KV_HEADS, HEAD_DIM or VALUE_DIM]; norms: [HEAD_DIM] or None; q: [T,
    NUM_HEADS, HEAD_DIM]. HEADS divides NUM_HEADS and NUM_KV_HEADS, so that a program's heads are of one sort. With EACH
    scales are [slots, NUM_KV_HEADS], and written.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = tl.arange(0, HEADS)[:, None] * HEAD_DIM
    offsets = tl.arange(0, HALF_PADDED)
    inside = offsets < HALF
    lows = heads + offsets[None, :]
    mask = (heads >= 0) & inside[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PADDED if REST_PADDED > 0 else 1)
    rests = heads + rest[None, :]
    rest_mask = (heads >= 0) & (rest < HEAD_DIM)[None, :]
    release(PDL)
    if q_norm_ptr is not None:
        # weights do not change, so they come before the wait
        norm_ptr = q_norm_ptr if first < NUM_HEADS else k_norm_ptr
        low_weight = tl.load(norm_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_ptr + HALF + offsets, mask=inside, other=0.0).to(tl.float32)
        if REST_PADDED > 0:
            rest_weight = tl.load(norm_ptr + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
    wait(PDL)
    qkv_ptr += token * ((NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + NUM_KV_HEADS * VALUE_DIM)
    if VALUE_DIM != HEAD_DIM:  # noqa: SIM102 - known when compiled, the other is not
        if first >= NUM_HEADS + NUM_KV_HEADS:
            slot = tl.load(slots_ptr + token).to(tl.int64) * NUM_KV_HEADS
            first -= NUM_HEADS + NUM_KV_HEADS
            numbers = tl.arange(0, HEADS * VALUE_PADDED)
            own = numbers < HEADS * VALUE_DIM
            qkv_ptr += (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + first * VALUE_DIM
            v_cache_ptr += (slot + first) * VALUE_DIM
            values = tl.load(qkv_ptr + numbers, mask=own, other=0.0)
            tl.store(v_cache_ptr + numbers, stored(values, v_cache_ptr, v_scale_ptr, LIMIT), mask=own)
            return
    qkv_ptr += first * HEAD_DIM
    low_read = tl.load(qkv_ptr + lows, mask=mask, other=0.0)
    high_read = tl.load(qkv_ptr + HALF + lows, mask=mask, other=0.0)
    rest_read = low_read
    if REST_PADDED > 0:
        rest_read = tl.load(qkv_ptr + rests, mask=rest_mask, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64) * NUM_KV_HEADS
    if first >= NUM_HEADS + NUM_KV_HEADS:
        head = slot + first - NUM_HEADS - NUM_KV_HEADS
        _store(
            low_read, high_read, rest_read, v_cache_ptr + head * HEAD_DIM, v_scale_ptr, head, lows, mask,
            rests, rest_mask, low_read.dtype, HALF, HEADS, REST_PADDED, LIMIT, EACH,
        )  # fmt: skip
    else:
        # all loads are under way before the first is needed
        cos_low, cos_high, sin_low, sin_high = load_angles(
            cos_ptr + token * COS_STRIDE, sin_ptr + token * SIN_STRIDE, offsets, inside, HALF
        )
        low, high = low_read.to(tl.float32), high_read.to(tl.float32)
        others = low
        if REST_PADDED > 0:
            others = rest_read.to(tl.float32)
        if q_norm_ptr is not None:
            squares = tl.sum(low * low + high * high, 1)
            if REST_PADDED > 0:
                squares += tl.sum(others * others, 1)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            low, high = low * factor * low_weight[None, :], high * factor * high_weight[None, :]
            if REST_PADDED > 0:
                others = others * factor * rest_weight[None, :]
        low, high = rotate(low, high, cos_low, cos_high, sin_low, sin_high)
        if first < NUM_HEADS:
            q_ptr += (token * NUM_HEADS + first) * HEAD_DIM
            tl.store(q_ptr + lows, low.to(q_ptr.dtype.element_ty), mask=mask)
            tl.store(q_ptr + HALF + lows, high.to(q_ptr.dtype.element_ty), mask=mask)
            if REST_PADDED > 0:
                tl.store(q_ptr + rests, others.to(q_ptr.dtype.element_ty), mask=rest_mask)
        else:
            head = slot + first - NUM_HEADS
            _store(
                low, high, others, k_cache_ptr + head * HEAD_DIM, k_scale_ptr, head, lows, mask,
                rests, rest_mask, low_read.dtype, HALF, HEADS, REST_PADDED, LIMIT, EACH,
            )  # fmt: skip


@cache
def _sizes(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, is_decode: bool, value_dim: int
) -> dict[str, int]:
    common = gcd(num_heads, num_kv_heads)
    heads = common & -common
    # few tokens: as many programs as there can be, each with loads of 16 bytes a lane
    tile = TILE // 4 if is_decode else TILE
    while heads > 1 and heads * head_dim > tile:
        heads //= 2
    rest = head_dim - rotary_dim
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HALF": rotary_dim // 2,
        "HEADS": heads,
        "HALF_PADDED": triton.next_power_of_2(rotary_dim // 2),
        "REST_PADDED": triton.next_power_of_2(rest) if rest else 0,
        "VALUE_PADDED": triton.next_power_of_2(value_dim),
    }


def rope_kv_write_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    head_norm: HeadNorm | None,
    kv_scale: KvScale | None,
) -> Tensor:
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    value_dim = v_cache.shape[3]
    num_heads = (width - num_kv_heads * value_dim) // head_dim - num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    sizes = _sizes(num_heads, num_kv_heads, head_dim, cos.shape[-1], num_tokens <= 32, value_dim)
    norm: Any = head_norm or (None, None, 0.0)
    scale: Any = kv_scale or (None, None)
    _rope_kv_write[(num_tokens, (num_heads + 2 * num_kv_heads) // sizes["HEADS"])](
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        norm[0],
        norm[1],
        scale[0],
        scale[1],
        q,
        norm[2],
        COS_STRIDE=cos.stride(0),
        SIN_STRIDE=sin.stride(0),
        LIMIT=limit_of(k_cache),
        EACH=kv_scale is not None and kv_scale.each,
        num_warps=1,
        **sizes,
        **options(qkv.device),
    )
    return q


IMPL = Impl(rope_kv_write, "triton", rope_kv_write_heads, needs_gpu, scales_each=True)


def _aot(name: str, heads: tuple[int, int, int], normed: bool, is_decode: bool = True, is_fp8: bool = False) -> AotCase:
    norm = "*bf16:16" if normed else None
    cache, scale = ("*fp8e4nv:16", "*fp32:16") if is_fp8 else ("*bf16:16", None)
    signature: dict[str, Constant] = {
        "qkv_ptr": "*bf16:16",
        "cos_ptr": "*bf16:16",
        "sin_ptr": "*bf16:16",
        "k_cache_ptr": cache,
        "v_cache_ptr": cache,
        "slots_ptr": "*i64",
        "q_norm_ptr": norm,
        "k_norm_ptr": norm,
        "k_scale_ptr": scale,
        "v_scale_ptr": scale,
        "q_ptr": "*bf16:16",
        "eps": "fp32",
        "COS_STRIDE": 2 * heads[2],
        "SIN_STRIDE": 2 * heads[2],
        **_sizes(*heads, heads[2], is_decode, heads[2]),
        "LIMIT": 240.0 if is_fp8 else 0.0,
        "EACH": False,
        "PDL": False,
    }
    return AotCase(name, _rope_kv_write, signature, num_warps=1)


AOT = (
    _aot("16x8x128_normed", (16, 8, 128), True),
    _aot("32x8x128", (32, 8, 128), False),
    _aot("32x4x128_normed", (32, 4, 128), True),
    _aot("32x8x128_fp8", (32, 8, 128), False, is_fp8=True),
    _aot("16x8x128_normed_many", (16, 8, 128), True, is_decode=False),
)

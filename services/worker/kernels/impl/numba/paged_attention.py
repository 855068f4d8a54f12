"""Decode rows read their pages in place, in parallel over rows and heads; rows with more tokens go the torch way.

Softmax in two passes over scores in scratch memory, fp32 throughout; no gather, no mask, no padding to longer rows.
"""

import struct
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from services.worker.kernels.impl.numba._team import kernel, launch, unavailable
from services.worker.kernels.ops.paged_attention import AttentionRows, attend, paged_attention
from services.worker.kernels.registry import Facts, Impl

_FAST = {"reassoc", "contract", "nsz", "arcp"}
_FLOATS, _INTS = types.CPointer(types.float32), types.CPointer(types.int32)


@intrinsic
def _floats(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return _FLOATS(types.int64), generate


@intrinsic
def _ints(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    return _INTS(types.int64), generate


@intrinsic
def _as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(types.float32(types.float32), fastmath={"contract"}, inline="always")
def _exp(x: float) -> float:
    """exp(x) for x <= 0 within two units in the last place; lower x count as -87. Cephes' method: 2^n times a polynomial."""
    x = max(x, types.float32(-87.0))
    n = types.int32(x * types.float32(1.44269504088896341) - types.float32(0.5))
    whole = types.float32(n)
    r = x - whole * types.float32(0.693359375)
    r = r - whole * types.float32(-2.12194440e-4)
    p = types.float32(1.9875691500e-4)
    p = p * r + types.float32(1.3981999507e-3)
    p = p * r + types.float32(8.3334519073e-3)
    p = p * r + types.float32(4.1665795894e-2)
    p = p * r + types.float32(1.6666665459e-1)
    p = p * r + types.float32(5.0000001201e-1)
    value = p * r * r + r + types.float32(1.0)
    return value * _as_float(types.int32((n + types.int32(127)) << types.int32(23)))


@njit(
    types.float32(_FLOATS, types.int64, types.int64, _FLOATS, types.int64, _FLOATS, types.int64, types.float32),
    fastmath=_FAST,
)
def _score(
    keys: Any, start: int, stride: int, query: Any, size: int, scores: Any, count: int, highest: float
) -> float:
    """scores[:count] of consecutive keys; returns the highest of them and `highest`."""
    for token in range(count):
        total = types.float32(0.0)
        place = start + token * stride
        for i in range(size):
            total += keys[place + i] * query[i]
        scores[token] = total
        highest = max(highest, total)
    return highest


@njit(types.float32(_FLOATS, types.int64, types.float32, types.float32), fastmath=_FAST)
def _exponentials(scores: Any, count: int, highest: float, scale: float) -> float:
    """scores = exp((score - highest) * scale); returns their sum."""
    total = types.float32(0.0)
    for i in range(count):
        value = _exp((scores[i] - highest) * scale)
        scores[i] = value
        total += value
    return total


@njit(types.void(_FLOATS, types.int64, types.int64, _FLOATS, types.int64, _FLOATS, types.int64), fastmath=_FAST)
def _collect(values: Any, start: int, stride: int, out: Any, size: int, weights: Any, count: int) -> None:
    """out += weights @ consecutive values. Four tokens at once: a quarter of the reads and writes of `out`."""
    token = 0
    while token + 4 <= count:
        w0, w1, w2, w3 = weights[token], weights[token + 1], weights[token + 2], weights[token + 3]
        p0 = start + token * stride
        p1, p2, p3 = p0 + stride, p0 + 2 * stride, p0 + 3 * stride
        for i in range(size):
            out[i] += w0 * values[p0 + i] + w1 * values[p1 + i] + w2 * values[p2 + i] + w3 * values[p3 + i]
        token += 4
    while token < count:
        w0, p0 = weights[token], start + token * stride
        for i in range(size):
            out[i] += w0 * values[p0 + i]
        token += 1


def _decode(numbers: Any, thread: int, threads: int) -> None:
    """One unit is one query head of one row; the heads of one KV head follow one another, so its pages stay cached."""
    q, k, v, out, scratch = (
        _floats(numbers[0]),
        _floats(numbers[1]),
        _floats(numbers[2]),
        numbers[3],
        numbers[4],
    )
    starts, contexts, tables = _ints(numbers[5]), _ints(numbers[6]), _ints(numbers[7])
    rows, width = numbers[8] >> 32, numbers[8] & 0xFFFFFFFF
    heads, kv_heads = numbers[9] >> 32, numbers[9] & 0xFFFFFFFF
    size, block_tokens, q_stride = numbers[10], numbers[11], numbers[12]
    scale = _as_float(types.int32(numbers[13]))
    stride, share = kv_heads * size, heads // kv_heads
    scores_at = scratch + thread * width * block_tokens * 4
    units = rows * heads
    for unit in range(thread * units // threads, (thread + 1) * units // threads):
        row, head = unit // heads, unit % heads
        token = types.int64(starts[row])
        if starts[row + 1] - starts[row] != 1:
            continue
        length = types.int64(contexts[row])
        query = _floats(numbers[0] + (token * q_stride + head * size) * 4)
        highest = types.float32(-3.0e38)
        own = head // share * size
        for first in range(0, length, block_tokens):
            place = types.int64(tables[row * width + first // block_tokens]) * block_tokens * stride + own
            scores = _floats(scores_at + first * 4)
            highest = _score(k, place, stride, query, size, scores, min(block_tokens, length - first), highest)
        total = _exponentials(_floats(scores_at), length, highest, scale)
        target = _floats(out + (token * heads + head) * size * 4)
        for i in range(size):
            target[i] = types.float32(0.0)
        for first in range(0, length, block_tokens):
            place = types.int64(tables[row * width + first // block_tokens]) * block_tokens * stride + own
            scores = _floats(scores_at + first * 4)
            _collect(v, place, stride, target, size, scores, min(block_tokens, length - first))
        factor = types.float32(1.0) / total
        for i in range(size):
            target[i] *= factor


_DECODE = kernel(_decode)


@cache
def _bits(scale: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def paged_attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    block_tokens, num_kv_heads = k_cache.shape[1:3]
    result = torch.empty(q.shape)
    num_rows, width = rows.block_tables.shape
    if num_rows == 0:
        return result
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * width * block_tokens)
    launch(
        _DECODE,
        threads,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        result.data_ptr(),
        scratch.data_ptr(),
        rows.query_starts.data_ptr(),
        rows.context_lens.data_ptr(),
        rows.block_tables.data_ptr(),
        num_rows << 32 | width,
        num_heads << 32 | num_kv_heads,
        head_dim,
        block_tokens,
        q.stride(0),
        _bits(scale),
    )
    if rows.max_query > 1:
        for group in rows.chunk_groups:
            result[group.tokens] = attend(q[group.tokens], k_cache, v_cache, group, scale)
    return result


def refuses(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return "for CPUs"
    if facts.dtype != torch.float32:
        return f"computes in fp32, not {str(facts.dtype).removeprefix('torch.')}"
    return unavailable()


IMPL = Impl(paged_attention, "numba", paged_attention_decode, refuses)

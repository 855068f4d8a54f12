"""Decode rows read their pages in place, in parallel over rows and heads; rows with more tokens go the torch way.

Softmax in two passes over scores in scratch memory, fp32 throughout; no gather, no mask, no padding to longer rows.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from services.worker.kernels.impl.numba._team import (
    as_float,
    float_bits,
    floats,
    ints,
    kernel,
    launch,
    refuses_but_fp32,
)
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec, attend, paged_attention
from services.worker.kernels.registry import Facts, Impl

_FAST = {"reassoc", "contract", "nsz", "arcp"}


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at any address; one that is not mapped does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        flags = [ir.Constant(flag, value) for value in (0, 3, 1)]
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte_pointer), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit
def _fetch(address: int, stride: int, size: int, count: int) -> None:
    """Asks for `size` floats of each of `count` tokens, ahead of their use: hardware does not follow a block table."""
    for token in range(count):
        for i in range(0, size, 16):
            _prefetch(address + (token * stride + i) * 4)


@njit(fastmath={"contract"}, inline="always")
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0, below -87 as there, within two units in the last place: 2^n times Cephes' polynomial."""
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
    return value * as_float(types.int32((n + types.int32(127)) << types.int32(23)))


@njit(fastmath=_FAST)
def _score(keys: Any, start: int, stride: int, query: Any, size: int, scores: Any, count: int, highest: float) -> Any:
    """scores[:count] of consecutive keys; returns the highest of them and `highest`."""
    for token in range(count):
        total = types.float32(0.0)
        place = start + token * stride
        for i in range(size):
            total += keys[place + i] * query[i]
        scores[token] = total
        highest = max(highest, total)
    return highest


@njit(fastmath=_FAST)
def _exponentials(scores: Any, count: int, highest: float, scale: float) -> Any:
    """scores = exp((score - highest) * scale); returns their sum."""
    total = types.float32(0.0)
    for i in range(count):
        value = _exp((scores[i] - highest) * scale)
        scores[i] = value
        total += value
    return total


@njit(fastmath=_FAST)
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
    """One unit is some query heads of one row. A page serves all of them before the next, so memory streams."""
    k, v = floats(numbers[1]), floats(numbers[2])
    starts, contexts, tables = ints(numbers[5]), ints(numbers[6]), ints(numbers[7])
    rows, width = numbers[8] >> 32, numbers[8] & 0xFFFFFFFF
    heads, kv_heads = numbers[9] >> 32, numbers[9] & 0xFFFFFFFF
    size, block_tokens, q_stride = numbers[10], numbers[11], numbers[12]
    scale = as_float(types.int32(numbers[13]))
    stride, share, span = kv_heads * size, heads // kv_heads, width * block_tokens + 1
    parts = 1 if rows >= 4 * threads else heads
    together = heads // parts
    # of each head of the unit: its scores, then their maximum
    scratch = numbers[4] + thread * heads * span * 4
    units = rows * parts
    for unit in range(thread * units // threads, (thread + 1) * units // threads):
        row, first_head = unit // parts, unit % parts * together
        if starts[row + 1] - starts[row] != 1:
            continue
        token, length = types.int64(starts[row]), types.int64(contexts[row])
        for i in range(together):
            floats(scratch + (i * span + span - 1) * 4)[0] = types.float32(-3.0e38)
        for first in range(0, length, block_tokens):
            page = types.int64(tables[row * width + first // block_tokens]) * block_tokens * stride
            count, left = min(block_tokens, length - first), length - first - block_tokens
            after = page
            if left > 0:
                after = types.int64(tables[row * width + first // block_tokens + 1]) * block_tokens * stride
            for i in range(together):
                head = first_head + i
                if head % share == 0 and left > 0:
                    _fetch(numbers[1] + (after + head // share * size) * 4, stride, size, min(block_tokens, left))
                query = floats(numbers[0] + (token * q_stride + head * size) * 4)
                scores = floats(scratch + (i * span + first) * 4)
                highest = floats(scratch + (i * span + span - 1) * 4)
                highest[0] = _score(k, page + head // share * size, stride, query, size, scores, count, highest[0])
        for i in range(together):
            scores = floats(scratch + i * span * 4)
            total = _exponentials(scores, length, scores[span - 1], scale)
            factor = types.float32(1.0) / total
            for j in range(length):
                scores[j] *= factor
            target = floats(numbers[3] + (token * heads + first_head + i) * size * 4)
            for j in range(size):
                target[j] = types.float32(0.0)
        for first in range(0, length, block_tokens):
            page = types.int64(tables[row * width + first // block_tokens]) * block_tokens * stride
            count, left = min(block_tokens, length - first), length - first - block_tokens
            after = page
            if left > 0:
                after = types.int64(tables[row * width + first // block_tokens + 1]) * block_tokens * stride
            for i in range(together):
                head = first_head + i
                if head % share == 0 and left > 0:
                    _fetch(numbers[2] + (after + head // share * size) * 4, stride, size, min(block_tokens, left))
                target = floats(numbers[3] + (token * heads + head) * size * 4)
                scores = floats(scratch + (i * span + first) * 4)
                _collect(v, page + head // share * size, stride, target, size, scores, count)


_DECODE = kernel(_decode)


def paged_attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec
) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    block_tokens, num_kv_heads = k_cache.shape[1:3]
    result = torch.empty(q.shape)
    num_rows, width = rows.tables.shape
    if num_rows == 0:
        return result
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * num_heads * (width * block_tokens + 1))
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
        rows.tables.data_ptr(),
        num_rows << 32 | width,
        num_heads << 32 | num_kv_heads,
        head_dim,
        block_tokens,
        q.stride(0),
        float_bits(spec.scale),
    )
    if rows.max_query > 1:
        for group in rows.chunk_groups:
            result[group.tokens] = attend(q[group.tokens], k_cache, v_cache, group, spec)
    return result


def refuses(facts: Facts) -> str | None:
    for name in ("window", "softcap", "sinks", "kv_fp8", "own_values"):
        if facts.shapes.get(name):
            return f"does not do {name}"
    return refuses_but_fp32(facts)


IMPL = Impl(paged_attention, "numba", paged_attention_decode, refuses)

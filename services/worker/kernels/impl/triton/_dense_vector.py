"""The product of one row with a weight: it streams the weight once, so bandwidth and latency are all that counts.

A program owns BLOCK_N outputs (twice as many weight rows with a gate) and all of K. Its threads lie along K only, so
each number of x is read once per program and no sum crosses threads before the end. The next tile is on its way
while one is multiplied; the first is requested before the kernel ahead has ended.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import activated
from services.worker.kernels.impl.triton._launch import release, wait


@triton.jit
def _tile(first, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k + BLOCK_K of the weight rows that start at `first`, [BLOCK_N, 1]. Read once: L1 is for x."""
    cols = (k + tl.arange(0, BLOCK_K))[None, :]
    if K % BLOCK_K == 0:
        return tl.load(first + cols, eviction_policy="evict_first")
    else:
        return tl.load(first + cols, mask=cols < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _part(pointer, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers k .. k + BLOCK_K of a vector."""
    cols = k + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        return tl.load(pointer + cols, eviction_policy="evict_last")
    else:
        return tl.load(pointer + cols, mask=cols < K, other=0.0, eviction_policy="evict_last")


@triton.jit
def _sums(tile, x, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """tile * x, [BLOCK_N, BLOCK_K], summed over the VECTOR numbers that one load gives a thread: none leaves it."""
    products = tile.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, [tile.shape[0], tile.shape[1] // VECTOR, VECTOR]), 2)


@triton.jit(do_not_specialize=["N"])
def vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = epilogue(rms_norm(x) @ weight.T + bias), with fp32 sums.

    x, norm: [K]; weight: [N, K], with an ACTIVATION [2N, K], gate rows first; bias: [N] or [2N]; out: [N], with ADD
    the residual that the product is added to.
    """
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    release(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end read the last row again: no mask in the loop
    inside = tl.minimum(rows, N - 1)
    first = weight_ptr + inside.to(tl.int64)[:, None] * K
    tile = _tile(first, 0, K, BLOCK_K)
    if ACTIVATION != "":
        first_up = first + N.to(tl.int64) * K
        tile_up = _tile(first_up, 0, K, BLOCK_K)
    if NORM:
        norm = _part(norm_ptr, 0, K, BLOCK_K)
        squares = tl.zeros([BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    sums_up = sums
    if BIAS:
        bias = tl.load(bias_ptr + inside).to(tl.float32)
        if ACTIVATION != "":
            bias_up = tl.load(bias_ptr + N + inside).to(tl.float32)
    wait(PDL)
    if ADD:
        residual = tl.load(out_ptr + inside)
    x = _part(x_ptr, 0, K, BLOCK_K)
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        next_tile = _tile(first, k, K, BLOCK_K)
        if ACTIVATION != "":
            next_up = _tile(first_up, k, K, BLOCK_K)
        next_x = _part(x_ptr, k, K, BLOCK_K)
        wide = x.to(tl.float32)
        if NORM:
            next_norm = _part(norm_ptr, k, K, BLOCK_K)
            squares += wide * wide
            wide *= norm.to(tl.float32)
            norm = next_norm
        sums += _sums(tile, wide, VECTOR)
        tile = next_tile
        if ACTIVATION != "":
            sums_up += _sums(tile_up, wide, VECTOR)
            tile_up = next_up
        x = next_x
    wide = x.to(tl.float32)
    if NORM:
        squares += wide * wide
        wide *= norm.to(tl.float32)
    sums += _sums(tile, wide, VECTOR)
    if ACTIVATION != "":
        sums_up += _sums(tile_up, wide, VECTOR)
    if NORM:
        # joined, the sums cross the threads at once: each time costs a barrier
        square = tl.sum(tl.reshape(squares, [1, BLOCK_K // VECTOR, VECTOR]), 2) + tl.zeros_like(sums)
        if ACTIVATION != "":
            all_sums = tl.sum(tl.join(tl.join(sums, square), tl.join(sums_up, square)), 1)
            out_up, square = tl.split(tl.permute(all_sums, (0, 2, 1)))
            out, up = tl.split(out_up)
            square, _ = tl.split(square)
        else:
            out, square = tl.split(tl.sum(tl.join(sums, square), 1))
        scale = tl.rsqrt(square / K + eps)
        out *= scale
        if ACTIVATION != "":
            up *= scale
    else:
        out = tl.sum(sums, 1)
        if ACTIVATION != "":
            up = tl.sum(sums_up, 1)
    if BIAS:
        out += bias
        if ACTIVATION != "":
            up += bias_up
    if ACTIVATION != "":
        out = activated(out, ACTIVATION) * up
    if ADD:
        out += residual.to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=rows < N)

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
    """Numbers k .. k + BLOCK_K of a vector, fp32."""
    cols = k + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        return tl.load(pointer + cols, eviction_policy="evict_last").to(tl.float32)
    else:
        return tl.load(pointer + cols, mask=cols < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


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
    release(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end read the last row again: no mask in the loop
    inside = tl.minimum(rows, N - 1)
    first = weight_ptr + inside.to(tl.int64)[:, None] * K
    tile = _tile(first, 0, K, BLOCK_K)
    if ACTIVATION != "":
        first_up = first + N.to(tl.int64) * K
        tile_up = _tile(first_up, 0, K, BLOCK_K)
        sums_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if NORM:
        norm = _part(norm_ptr, 0, K, BLOCK_K)
        squares = tl.zeros([BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    wait(PDL)
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=1):
        x = _part(x_ptr, k - BLOCK_K, K, BLOCK_K)
        next_tile = _tile(first, k, K, BLOCK_K)
        if ACTIVATION != "":
            next_up = _tile(first_up, k, K, BLOCK_K)
        if NORM:
            next_norm = _part(norm_ptr, k, K, BLOCK_K)
            squares += x * x
            x *= norm
            norm = next_norm
        sums += tile.to(tl.float32) * x[None, :]
        tile = next_tile
        if ACTIVATION != "":
            sums_up += tile_up.to(tl.float32) * x[None, :]
            tile_up = next_up
    x = _part(x_ptr, ((K - 1) // BLOCK_K) * BLOCK_K, K, BLOCK_K)
    if NORM:
        squares += x * x
        x *= norm
    out = tl.sum(sums + tile.to(tl.float32) * x[None, :], 1)
    if ACTIVATION != "":
        up = tl.sum(sums_up + tile_up.to(tl.float32) * x[None, :], 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        out *= scale
        if ACTIVATION != "":
            up *= scale
    if BIAS:
        out += tl.load(bias_ptr + inside).to(tl.float32)
        if ACTIVATION != "":
            up += tl.load(bias_ptr + N + inside).to(tl.float32)
    if ACTIVATION != "":
        out = activated(out, ACTIVATION) * up
    if ADD:
        out += tl.load(out_ptr + inside).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=rows < N)

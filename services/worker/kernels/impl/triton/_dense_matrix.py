"""The product of few rows (2 to 64) with a weight, on matrix units, with the weight as the left operand.

So a tile's long side lies along the weight's rows, where there are many, and the short one along x's rows. The
weight is streamed once through a pipelined loop; where one tile holds all of K it is loaded before the kernel ahead
has ended. With SPLIT > 1 groups of warps own parts of K: narrow tiles then still occupy all warps without reading
shared memory several times.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import activated
from services.worker.kernels.impl.triton._launch import release, wait


@triton.jit
def _columns(k, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k + BLOCK_K, [1, BLOCK_K]; split: [SPLIT, 1, BLOCK_K / SPLIT]."""
    if SPLIT == 1:
        return k + tl.arange(0, BLOCK_K)[None, :]
    else:
        part: tl.constexpr = BLOCK_K // SPLIT
        return k + tl.arange(0, SPLIT)[:, None, None] * part + tl.arange(0, part)[None, None, :]


@triton.jit
def _upright(numbers, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A vector as a column, [.., 1]."""
    if SPLIT == 1:
        return numbers[:, None]
    else:
        return numbers[None, :, None]


@triton.jit
def _tile(first, cols, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight's numbers at rows `first` and columns `cols`."""
    if K % BLOCK_K == 0:
        return tl.load(first + cols)
    else:
        return tl.load(first + cols, mask=cols < K, other=0.0)


@triton.jit
def _product(tile, x, sums, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + tile @ x.T."""
    if SPLIT == 1:
        return tl.dot(tile, tl.trans(x), sums, input_precision="ieee")
    else:
        return tl.dot(tile, tl.permute(x, (0, 2, 1)), sums, input_precision="ieee")


@triton.jit
def _touch(first, K: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requests one number of every 32 bytes of the first DEPTH tiles and drops it, so that the loop finds them in L2.

    Volatile, or nothing of it would be left. first: [BLOCK_N].
    """
    for step in tl.static_range(DEPTH):
        cols = step * BLOCK_K + tl.arange(0, BLOCK_K // 16)[None, :] * 16
        tl.load(first[:, None] + cols, mask=cols < K, other=0.0, volatile=True)


@triton.jit(do_not_specialize=["M", "N"])
def matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    M,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = epilogue(rms_norm(x) @ weight.T + bias), with fp32 sums. M <= BLOCK_M.

    x: [M, K]; norm: [K]; weight: [N, K], with an ACTIVATION [2N, K], gate rows first; bias: [N] or [2N]; out: [M, N],
    with ADD the residual that the product is added to. The norm's factor is applied to the sums: x * norm is what is
    rounded, and the squares are summed in the same loop.
    """
    release(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    inside = tl.minimum(rows, N - 1)
    starts = weight_ptr + inside.to(tl.int64) * K
    starts_up = starts + N.to(tl.int64) * K
    first = _upright(starts, SPLIT)
    first_up = _upright(starts_up, SPLIT)
    first_x = x_ptr + _upright(m, SPLIT) * K
    mask_x = _upright(m, SPLIT) < M
    shape: tl.constexpr = (BLOCK_N, BLOCK_M) if SPLIT == 1 else (SPLIT, BLOCK_N, BLOCK_M)
    whole: tl.constexpr = K <= BLOCK_K
    if whole:
        # the loop below would load it behind the wait
        cols = _columns(0, BLOCK_K, SPLIT)
        tile = _tile(first, cols, K, BLOCK_K)
        if ACTIVATION != "":
            tile_up = _tile(first_up, cols, K, BLOCK_K)
    elif PDL:
        _touch(starts, K, BLOCK_K, DEPTH)
        if ACTIVATION != "":
            _touch(starts_up, K, BLOCK_K, DEPTH)
    sums = tl.zeros(shape, tl.float32)
    sums_up = tl.zeros(shape, tl.float32)
    if SPLIT == 1:
        squares = tl.zeros([BLOCK_M], tl.float32)
    else:
        squares = tl.zeros([SPLIT, BLOCK_M], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + inside).to(tl.float32)
        if ACTIVATION != "":
            bias_up = tl.load(bias_ptr + N + inside).to(tl.float32)
    target = out_ptr + m[None, :] * N + rows[:, None]
    mask = (m[None, :] < M) & (rows[:, None] < N)
    wait(PDL)
    if ADD:
        residual = tl.load(target, mask=mask, other=0.0)
    for k in tl.range(0, K, BLOCK_K):
        cols = _columns(k, BLOCK_K, SPLIT)
        x = tl.load(first_x + cols, mask=mask_x & (cols < K), other=0.0)
        if not whole:
            tile = _tile(first, cols, K, BLOCK_K)
            if ACTIVATION != "":
                tile_up = _tile(first_up, cols, K, BLOCK_K)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, -1)
            norm = tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
            x = (wide * norm).to(x.dtype)
        sums = _product(tile, x, sums, SPLIT)
        if ACTIVATION != "":
            sums_up = _product(tile_up, x, sums_up, SPLIT)
    if SPLIT > 1:
        out = tl.sum(sums, 0)
        up = tl.sum(sums_up, 0)
        square = tl.sum(squares, 0)
    else:
        out = sums
        up = sums_up
        square = squares
    if NORM:
        scale = tl.rsqrt(square / K + eps)[None, :]
        out *= scale
        up *= scale
    if BIAS:
        out += bias[:, None]
        if ACTIVATION != "":
            up += bias_up[:, None]
    if ACTIVATION != "":
        out = activated(out, ACTIVATION) * up
    if ADD:
        out += residual.to(tl.float32)
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)

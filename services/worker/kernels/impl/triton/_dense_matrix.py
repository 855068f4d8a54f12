"""The product of few rows (2 to 64) with a weight, on matrix units, with the weight as the left operand.

So a tile's long side lies along the weight's rows, where there are many, and the short one along x's rows. The
weight is streamed once through a pipelined loop; where one tile holds all of K it is loaded before the kernel ahead
has ended. With SPLIT > 1 groups of warps own parts of K: narrow tiles then still occupy all warps without reading
shared memory several times. With PARTS > 1 programs own parts of K: wide tiles, which read x less often, then still
occupy all processors. The last of them to arrive adds the parts up in their order, so that no sum depends on time.
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
def _tile(first, cols, K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight's numbers at rows `first` and columns `cols`; EVEN: which are never past K."""
    if EVEN:
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
def _touch(first, k, K: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requests one number of every 32 bytes of DEPTH tiles from column k on and drops it: the loop finds them in L2.

    Volatile, or nothing of it would be left. first: [BLOCK_N].
    """
    for step in tl.static_range(DEPTH):
        cols = k + step * BLOCK_K + tl.arange(0, BLOCK_K // 16)[None, :] * 16
        tl.load(first[:, None] + cols, mask=cols < K, other=0.0, volatile=True)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    out, up, square, bias, bias_up, residual, target, mask, eps,
    K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The epilogue. out, up, residual, target, mask: [BLOCK_N, BLOCK_M]; square: [BLOCK_M]; bias: [BLOCK_N]."""
    if NORM:
        scale = tl.rsqrt(square / K + eps)[None, :]
        out *= scale
        up *= scale
    if BIAS:
        out += bias[:, None]
        up += bias_up[:, None]
    if ACTIVATION != "":
        out = activated(out, ACTIVATION) * up
    if ADD:
        out += residual.to(tl.float32)
    tl.store(target, out.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])  # of N it is to be known whether rows of `out` begin at multiples of 16 bytes
def matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
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
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = epilogue(rms_norm(x) @ weight.T + bias), with fp32 sums. M <= BLOCK_M. Grid: (blocks of outputs, PARTS).

    x: [M, K]; norm: [K]; weight: [N, K], with an ACTIVATION [2N, K], gate rows first; bias: [N] or [2N]; out: [M, N],
    with ADD the residual that the product is added to. parts: fp32 [blocks, PARTS, part_size(...)], undefined;
    arrived: int32 [blocks], zero before and after. The norm's factor is applied to the sums: x * norm is what is
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
    span: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K  # columns per part
    even: tl.constexpr = span * PARTS == K
    whole: tl.constexpr = span == BLOCK_K
    start = tl.program_id(1) * span
    if whole:
        # the loop below would load it behind the wait
        cols = _columns(start, BLOCK_K, SPLIT)
        tile = _tile(first, cols, K, even)
        if ACTIVATION != "":
            tile_up = _tile(first_up, cols, K, even)
    elif PDL:
        _touch(starts, start, K, BLOCK_K, DEPTH)
        if ACTIVATION != "":
            _touch(starts_up, start, K, BLOCK_K, DEPTH)
    sums = tl.zeros(shape, tl.float32)
    sums_up = tl.zeros(shape, tl.float32)
    if SPLIT == 1:
        squares = tl.zeros([BLOCK_M], tl.float32)
    else:
        squares = tl.zeros([SPLIT, BLOCK_M], tl.float32)
    bias = 0.0
    bias_up = 0.0
    residual = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + inside).to(tl.float32)
        bias_up = bias
        if ACTIVATION != "":
            bias_up = tl.load(bias_ptr + N + inside).to(tl.float32)
    target = out_ptr + m[None, :] * N + rows[:, None]
    mask = (m[None, :] < M) & (rows[:, None] < N)
    wait(PDL)
    if ADD and PARTS == 1:
        residual = tl.load(target, mask=mask, other=0.0)
    for step in tl.range(0, span, BLOCK_K):
        cols = _columns(start + step, BLOCK_K, SPLIT)
        x = tl.load(first_x + cols, mask=mask_x & (cols < K), other=0.0)
        if not whole:
            tile = _tile(first, cols, K, even)
            if ACTIVATION != "":
                tile_up = _tile(first_up, cols, K, even)
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
    if PARTS == 1:
        _finish(
            out, up, square, bias, bias_up, residual, target, mask, eps, K, NORM, BIAS, ADD, ACTIVATION
        )  # fmt: skip
    else:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        stride: tl.constexpr = size * (2 if ACTIVATION != "" else 1) + BLOCK_M
        places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        block_ptr = parts_ptr + tl.program_id(0) * (PARTS * stride)
        part_ptr = block_ptr + tl.program_id(1) * stride
        tl.store(part_ptr + BLOCK_M + places, out)
        if ACTIVATION != "":
            tl.store(part_ptr + BLOCK_M + size + places, up)
        if NORM:
            tl.store(part_ptr + m, square)
        tl.debug_barrier()  # one thread announces what all have written
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == PARTS - 1:
            out = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            square = tl.zeros([BLOCK_M], tl.float32)
            for part in tl.range(0, PARTS, num_stages=1):
                # past L1, which other processors' writes do not reach
                out += tl.load(block_ptr + part * stride + BLOCK_M + places, cache_modifier=".cg")
                if ACTIVATION != "":
                    up += tl.load(block_ptr + part * stride + BLOCK_M + size + places, cache_modifier=".cg")
                if NORM:
                    square += tl.load(block_ptr + part * stride + m, cache_modifier=".cg")
            added = residual
            if ADD:
                added = tl.load(target, mask=mask, other=0.0)
            _finish(
                out, up, square, bias, bias_up, added, target, mask, eps, K, NORM, BIAS, ADD, ACTIVATION
            )  # fmt: skip
            tl.store(arrived_ptr + tl.program_id(0), 0)


def part_size(block_n: int, block_m: int, gated: bool) -> int:
    """Numbers that one part of one block of outputs leaves for the others: squares, sums, the gate's sums."""
    return block_m + block_n * block_m * (2 if gated else 1)

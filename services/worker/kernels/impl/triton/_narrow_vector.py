"""Products of single rows with weights of 8 and 4 bits: the weight is streamed once, 16 bytes a thread and load.

As `_dense_vector`: a program owns BLOCK_N outputs and all of K, its threads lie along K only, the next tile is on its
way while one is multiplied. Numbers of one load share a scale, so that each is widened and multiplied in fp32 and
their sum is scaled. Four bits become a float behind a set exponent: 1 + n / 16 of int4, and e2m1 as it is.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._narrow import column, gated, power, row_start, scale_column, scale_start

LIFT = tl.constexpr(2.0**64)  # of x, so that its products with e2m1 * 2**-126 are no subnormals
DROP = tl.constexpr(2.0**62)


@triton.jit
def _tile(starts, k, K: tl.constexpr, FORM: tl.constexpr, TILED: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k + BLOCK_K as stored, [BLOCK_N, BLOCK_K]; of four bits words of eight, [BLOCK_N, BLOCK_K / 8]."""
    PACKED: tl.constexpr = 8 if FORM == "mxfp4" or FORM == "int4" else 1
    cols = k // PACKED + tl.arange(0, BLOCK_K // PACKED)
    ptrs = starts[:, None] + column(cols, TILED, 4 if PACKED == 8 else 16)[None, :]
    return tl.load(ptrs, mask=(cols < K // PACKED)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    starts, k, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of columns k .. k + BLOCK_K, one per VECTOR, [BLOCK_N, BLOCK_K / VECTOR], as stored."""
    cols = k + tl.arange(0, BLOCK_K // VECTOR) * VECTOR
    ptrs = starts[:, None] + scale_column(cols, FORM, GROUP, TILED)[None, :]
    return tl.load(ptrs, mask=(cols < K)[None, :], other=0.0)


@triton.jit
def _word_sums(words, x, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The eight numbers of each word times theirs of x [8 * words], in the form's own units; and x's sum by word."""
    first, second = tl.split(tl.reshape(x, [words.shape[1], 2, 2, 2]))
    a, c = tl.split(first)
    b, d = tl.split(second)
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(c)
    x1, x5 = tl.split(b)
    x3, x7 = tl.split(d)
    parts = (x0, x1, x2, x3, x4, x5, x6, x7)
    sums = tl.zeros(words.shape, tl.float32)
    every = tl.zeros([words.shape[1]], tl.float32)
    for i in tl.static_range(8):
        part = parts[i].to(tl.float32)
        if FORM == "int4":
            if 4 * i <= 19:
                bits = words << (19 - 4 * i)
            else:
                bits = words >> (4 * i - 19)
            bits = (bits & 0x780000) | 0x3F800000
            every += part
        else:
            # sign to bit 31, the rest to 24 .. 22: between them copies of the sign, which go
            bits = ((words << (28 - 4 * i)) >> 6) & -2118123520
            part *= LIFT
        sums += bits.to(tl.float32, bitcast=True) * part[None, :]
    return sums, every


@triton.jit
def _part(tile, scales, zeros, x, FORM: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over VECTOR columns each, [BLOCK_N, BLOCK_K / VECTOR]: nothing but x changes threads. x: [BLOCK_K]."""
    rows: tl.constexpr = tile.shape[0]
    chunks: tl.constexpr = x.shape[0] // VECTOR
    if FORM == "mxfp4" or FORM == "int4":
        sums, every = _word_sums(tile, x, FORM)
        part = tl.sum(tl.reshape(sums, [rows, chunks, 4]), 2)
        if FORM == "int4":
            part = part * 16.0 - tl.sum(tl.reshape(every, [chunks, 4]), 1)[None, :] * (zeros + 16.0)
        else:
            part *= DROP
    else:
        part = tl.sum(tl.reshape(tile.to(tl.float32) * x.to(tl.float32)[None, :], [rows, chunks, VECTOR]), 2)
    if FORM == "mxfp4" or FORM == "mxfp8":
        part *= power(scales)
    elif FORM != "rows":
        part *= scales.to(tl.float32)
    return part


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    weight_ptr, scales_ptr, zeros_ptr, row, expert, k, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile of these rows at column k with its scales and zeros, all requested."""
    tile = _tile(
        weight_ptr + row_start(row, K, FORM, TILED, 4 if VECTOR == 32 else 16), k, K, FORM, TILED, BLOCK_K
    )  # fmt: skip
    scales = 0.0
    zeros = 8.0
    if FORM != "rows":
        start = scale_start(row, expert, K, FORM, GROUP, False, TILED)
        scales = _scales(scales_ptr + start, k, K, FORM, GROUP, TILED, VECTOR, BLOCK_K)
        if zeros_ptr is not None:
            zeros = _scales(zeros_ptr + start, k, K, FORM, GROUP, TILED, VECTOR, BLOCK_K).to(tl.float32)
    return tile, scales, zeros


@triton.jit
def _row(pointer, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers k .. k + BLOCK_K of a vector, as stored: what is on its way takes fewer registers so."""
    cols = k + tl.arange(0, BLOCK_K)
    return tl.load(pointer + cols, mask=cols < K, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["N"])
def narrow_vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scales_ptr,
    norm_ptr,
    experts_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    eps,
    N,
    x_scale_row,
    x_scale_block,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    TILED: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, N] = epilogue(rms_norm(x) @ weight.T + bias), sums in fp32. Grid: (rows, blocks of outputs).

    The arguments are those of `narrow_matrix_kernel`; weights of four bits come as int32. experts: int32, that of each
    row, which is a pair of token and expert then; None: all rows have the one weight.
    """
    VECTOR: tl.constexpr = 32 if FORM == "mxfp4" or FORM == "int4" else 16
    is_gated: tl.constexpr = ACTIVATION != ""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end read the last one again: no mask in the loop
    row = tl.minimum(n, N - 1).to(tl.int64)
    expert = 0
    if experts_ptr is None:
        release(PDL)
    else:
        wait(PDL)
        # behind the wait: the next kernel reads `experts` without one
        release(PDL)
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        row += expert * N * (2 if is_gated else 1)
    row_up = row + N
    tile, scales, zeros = _weight(
        weight_ptr, scales_ptr, zeros_ptr, row, expert, 0, K, FORM, GROUP, TILED, VECTOR, BLOCK_K
    )  # fmt: skip
    if is_gated:
        tile_up, scales_up, zeros_up = _weight(
            weight_ptr, scales_ptr, zeros_ptr, row_up, expert, 0, K, FORM, GROUP, TILED, VECTOR, BLOCK_K
        )  # fmt: skip
    if norm_ptr is not None:
        norm = _row(norm_ptr, 0, K, BLOCK_K)
        squares = tl.zeros([BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    sums_up = sums
    if experts_ptr is None:
        wait(PDL)
    token = (pair // TOP_K).to(tl.int64)
    x_start = x_ptr + token * K
    x = _row(x_start, 0, K, BLOCK_K)
    for k in tl.range(0, K, BLOCK_K, num_stages=1):
        if K > BLOCK_K:  # past the end it is masked, and no request
            next_tile, next_scales, next_zeros = _weight(
                weight_ptr, scales_ptr, zeros_ptr, row, expert, k + BLOCK_K, K, FORM, GROUP, TILED, VECTOR, BLOCK_K
            )  # fmt: skip
            next_x = _row(x_start, k + BLOCK_K, K, BLOCK_K)
        numbers = x
        if x_scales_ptr is not None and FORM == "blocks":
            cols = k + tl.arange(0, BLOCK_K)
            x_scales_ptrs = x_scales_ptr + token * x_scale_row + cols // 128 * x_scale_block
            numbers = x.to(tl.float32) * tl.load(x_scales_ptrs, mask=cols < K, other=0.0)
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            squares += wide * wide
            numbers = wide * norm.to(tl.float32)
            if FORM == "mxfp4" or FORM == "int4":
                numbers = numbers.to(x.dtype)  # half as much to move between threads
            if K > BLOCK_K:
                norm = _row(norm_ptr, k + BLOCK_K, K, BLOCK_K)
        sums += _part(tile, scales, zeros, numbers, FORM, VECTOR)
        if is_gated:
            sums_up += _part(tile_up, scales_up, zeros_up, numbers, FORM, VECTOR)
            if K > BLOCK_K:
                tile_up, scales_up, zeros_up = _weight(
                    weight_ptr, scales_ptr, zeros_ptr, row_up, expert, k + BLOCK_K,
                    K, FORM, GROUP, TILED, VECTOR, BLOCK_K,
                )  # fmt: skip
        if K > BLOCK_K:
            tile, scales, zeros, x = next_tile, next_scales, next_zeros, next_x
    factor = 1.0
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if x_scales_ptr is not None and FORM == "rows":
        factor = tl.load(x_scales_ptr + token * x_scale_row)
    out = tl.sum(sums, 1) * factor
    up = tl.sum(sums_up, 1) * factor
    if FORM == "rows":
        out *= tl.load(scales_ptr + scale_start(row, expert, K, FORM, GROUP, ROW_SCALE, TILED)).to(tl.float32)
        if is_gated:
            up *= tl.load(scales_ptr + scale_start(row_up, expert, K, FORM, GROUP, ROW_SCALE, TILED)).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + row).to(tl.float32)
        if is_gated:
            up += tl.load(bias_ptr + row_up).to(tl.float32)
    if is_gated:
        out = gated(out, up, ACTIVATION)
    target = out_ptr + pair.to(tl.int64) * N + n
    if ADD:
        out += tl.load(target, mask=n < N, other=0.0).to(tl.float32)
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=n < N)

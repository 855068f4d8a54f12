"""Products of single rows with weights of 8 and 4 bits: the weight is streamed once, as words of 32 bits.

As `_dense_vector`: a program owns BLOCK_N outputs and all of K, its threads lie along K only, the next tile is on its
way while one is multiplied. A load gives a thread as many columns of a row as one of x does, so that no number crosses
threads before the end. Nothing converts numbers: the lower 24 bits of a float count
units of 2^-149, so that an integer is masked out of its word where it lies, and e4m3 and e2m1 are the floats that they
nearly are, 2^-120 and 2^-126 as large. x is made larger, so that no product is subnormal. With DOTS the integers and
e2m1 are multiplied as `_narrow_dots` says, in the same loop.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _narrow_dots, _narrow_halves
from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._narrow import column, gated, power, row_start, scale_column, scale_start

VECTOR = tl.constexpr(8)  # columns of a thread's per row and load
LIFT = tl.constexpr(2.0**85)  # of x
BYTE = tl.constexpr(2.0 ** (7 + 85 - 149))  # 128 times x, as a product


@triton.jit
def _load(ptrs, cols, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """What there is of columns k .. k + BLOCK_K, zeros past K. A step past the end requests nothing and is not used."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs, mask=k < K)
    else:
        return tl.load(ptrs, mask=cols < K, other=0.0)


@triton.jit
def _load_scales(ptrs, cols, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those of `cols`. Few, but small: a mask would cost more instructions than the load."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=cols < K, other=0.0)


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    weight_ptr, scales_ptr, zeros_ptr, first, expert, k, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, PER: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns k .. k + BLOCK_K of rows first .. first + BLOCK_N, requested: words [BLOCK_N, BLOCK_K / PER], and scales
    and zeros per SPAN, a thread's columns. `first` is a multiple of BLOCK_N, and k of BLOCK_K: so places are sums of
    what is the same for all threads, and of what a thread knows from the start.
    """
    rows = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K // PER)
    start = weight_ptr + row_start(first, K, FORM, TILED, 4) + column(k // PER, TILED, 4)
    ptrs = start + (row_start(rows, K, FORM, TILED, 4)[:, None] + column(cols, TILED, 4)[None, :])
    ptrs = tl.max_contiguous(ptrs, (1, SPAN // PER))
    if K % BLOCK_K == 0 or SPAN == VECTOR:
        words = _load(ptrs, (k + cols * PER)[None, :], k, K, BLOCK_K)
    else:  # SPAN divides K
        words = tl.load(ptrs, mask=tl.max_constancy((k + cols * PER < K)[None, :], (1, SPAN // PER)), other=0)
    scales = 0.0
    zeros = tl.full([1, 1], 8, tl.int32)
    if FORM != "rows":
        SAME: tl.constexpr = FORM == "blocks" and 128 % BLOCK_N == 0  # rows have the same scales
        scale_rows = tl.arange(0, 1 if SAME else BLOCK_N)
        cols = tl.arange(0, BLOCK_K // SPAN) * SPAN
        if K % BLOCK_K == 0:
            k = tl.minimum(k, K - BLOCK_K)  # past the end the last ones again
        start = scale_start(first, expert, K, FORM, GROUP, False, TILED)
        if BLOCK_K % (8 * GROUP) == 0:
            start += scale_column(k, FORM, GROUP, TILED)
            places = scale_column(cols, FORM, GROUP, TILED)
        else:
            places = scale_column(k + cols, FORM, GROUP, TILED)
        places = scale_start(scale_rows, 0, K, FORM, GROUP, True, TILED)[:, None] + places[None, :]
        scales = _load_scales(scales_ptr + start + places, (k + cols)[None, :], K, BLOCK_K)
        if zeros_ptr is not None:
            zeros = _load_scales(zeros_ptr + start + places, (k + cols)[None, :], K, BLOCK_K)
    return words, scales, zeros


@triton.jit
def small(  # type: ignore[no-untyped-def]
    scales_ptr, bias_ptr, first, expert, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr, TILED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales of whole rows and biases of rows first .. first + BLOCK_N, 1 and 0 where there are none: asked for with
    the weight, since at the end a program would wait for them.
    """
    row = first + tl.arange(0, BLOCK_N)
    scales = tl.full([BLOCK_N], 1.0, tl.float32)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if FORM == "rows":
        scales = tl.load(scales_ptr + scale_start(row, expert, K, FORM, GROUP, ROW_SCALE, TILED)).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    return scales, bias


@triton.jit
def _by_place(x, PER: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [BLOCK_K] as fp32 of the first, second .. numbers of each word: a tuple of PER."""
    if PER == 8:
        first, second = tl.split(tl.reshape(x, [x.shape[0] // 8, 2, 2, 2]))
        a, c = tl.split(first)
        b, d = tl.split(second)
        x0, x4 = tl.split(a)
        x2, x6 = tl.split(c)
        x1, x5 = tl.split(b)
        x3, x7 = tl.split(d)
        return (
            x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32),
            x4.to(tl.float32), x5.to(tl.float32), x6.to(tl.float32), x7.to(tl.float32),
        )  # fmt: skip
    else:
        first, second = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
        x0, x2 = tl.split(first)
        x1, x3 = tl.split(second)
        return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def _every(placed, PER: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x's sums by UNIT columns."""
    every = placed[0]
    for i in tl.static_range(1, PER):
        every += placed[i]
    return tl.sum(tl.reshape(every, [every.shape[0] * PER // UNIT, UNIT // PER]), 1)


@triton.jit
def _product(words, placed, i: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The i-th number of each word, and x beside it: floats whose product is to be multiplied by `_unit`."""
    lift: tl.constexpr = LIFT
    if CODE == "int4":
        if i < 6:
            bits = words & (15 << (4 * i))
            lift = LIFT * 2.0 ** (-4 * i)
        else:
            bits = (words.to(tl.uint32, bitcast=True) >> (4 * i)) & 15
    elif CODE == "int8":
        # two's complement: the upper bit turned round adds 128
        bits = words.to(tl.uint32, bitcast=True) ^ 0x80808080
        if i < 3:
            bits &= 255 << (8 * i)
            lift = LIFT * 2.0 ** (-8 * i)
        else:
            bits >>= 24
    elif CODE == "e2m1":
        # sign to bit 31, the rest to the exponent's lower end: between them copies of the sign, which go
        bits = ((words << (28 - 4 * i)) >> 6) & -2118123520
    else:
        bits = ((words << (24 - 8 * i)) >> 4) & -2014314496
    return bits.to(tl.float32, bitcast=True), (placed[i] * lift)[None, :]


@triton.jit
def _unit(CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """By what sums of such products are to be multiplied."""
    if CODE == "int4" or CODE == "int8":
        return 2.0 ** (149 - 85)
    elif CODE == "e2m1":
        return 2.0 ** (126 - 85)
    else:
        return 2.0 ** (120 - 85) if CODE == "e4m3" else 2.0 ** (119 - 85)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    sums, words, scales, zeros, placed, every,
    FORM: tl.constexpr, CODE: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """sums + the products of words and x (`placed`, `every`), but for `_unit`: by word, or scaled by VECTOR columns."""
    part = sums if FORM == "rows" else tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(PER):
        number, by = _product(words, placed, i, CODE)
        part += number * by
    if FORM != "rows":
        part = tl.sum(tl.reshape(part, [words.shape[0], words.shape[1] * PER // VECTOR, VECTOR // PER]), 2)
        if CODE == "int4":
            part -= zeros.to(tl.int32).to(tl.float32, bitcast=True) * (every * LIFT)[None, :]
        elif CODE == "int8":
            part -= (every * BYTE)[None, :]
        if FORM == "mxfp4" or FORM == "mxfp8":
            part *= power(scales)
        else:
            part *= scales.to(tl.float32)
        part += sums
    return part


@triton.jit
def _row(pointer, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers k .. k + BLOCK_K of a vector, as stored: what is on its way takes fewer registers so."""
    cols = k + tl.arange(0, BLOCK_K)
    return _load(tl.max_contiguous(pointer + cols, VECTOR), cols, k, K, BLOCK_K)


@triton.jit
def _vector(pointer, k, K: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr, DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers k .. k + BLOCK_K of a vector, as the two forms take them."""
    if DOTS:
        return _narrow_dots.pieces(pointer, k, K, BLOCK_K, SPAN)
    else:
        return _row(pointer, k, K, BLOCK_K)


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
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    TILED: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, N] = epilogue(rms_norm(x) @ weight.T + bias), sums in fp32. Grid: (rows, blocks of outputs).

    The arguments are those of `narrow_matrix_kernel`, but the weight comes as int32. CODE: of a number, "int4", "int8",
    "e2m1", "e4m3" or "e4m3fnuz". BLOCK_N divides N, PER K. experts: int32, that of each row, which is a
    pair of token and expert then; None: all rows have the one weight.
    """
    PER: tl.constexpr = 8 if CODE == "int4" or CODE == "e2m1" else 4
    SPAN: tl.constexpr = 4 * PER if DOTS else VECTOR
    is_gated: tl.constexpr = ACTIVATION != ""
    pair = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    expert = 0
    if experts_ptr is None:
        release(PDL)
    else:
        wait(PDL)
        # behind the wait: the next kernel reads `experts` without one
        release(PDL)
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        first += expert * N * (2 if is_gated else 1)
    words, scales, zeros = _weight(
        weight_ptr, scales_ptr, zeros_ptr, first, expert, 0, K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K
    )  # fmt: skip
    if is_gated:
        words_up, scales_up, zeros_up = _weight(
            weight_ptr, scales_ptr, zeros_ptr, first + N, expert, 0,
            K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if norm_ptr is not None:
        norm = _vector(norm_ptr, 0, K, BLOCK_K, SPAN, DOTS)
        squares = tl.zeros([BLOCK_K // SPAN if DOTS else BLOCK_K], tl.float32)
    UNIT: tl.constexpr = PER if FORM == "rows" and not DOTS else SPAN  # columns of a sum
    sums = tl.zeros([BLOCK_N, BLOCK_K // UNIT], tl.float32)
    sums_up = sums
    every = tl.zeros([BLOCK_K // UNIT], tl.float32)
    total = every
    row_scales, bias = small(scales_ptr, bias_ptr, first, expert, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N)
    if is_gated:
        row_scales_up, bias_up = small(
            scales_ptr, bias_ptr, first + N, expert, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N
        )  # fmt: skip
    if experts_ptr is None:
        wait(PDL)
    target = out_ptr + pair.to(tl.int64) * N + n
    if ADD:
        residual = tl.load(target)
    token = (pair // TOP_K).to(tl.int64)
    x_start = x_ptr + token * K
    x = _vector(x_start, 0, K, BLOCK_K, SPAN, DOTS)
    table = _narrow_dots.tables(N >> 31)
    for k in tl.range(0, K, BLOCK_K, num_stages=1):
        if K > BLOCK_K:  # past the end it is masked, and no request
            next_words, next_scales, next_zeros = _weight(
                weight_ptr, scales_ptr, zeros_ptr, first, expert, k + BLOCK_K,
                K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            next_x = _vector(x_start, k + BLOCK_K, K, BLOCK_K, SPAN, DOTS)
        if DOTS:
            numbers = _narrow_dots.wide(x)
            if norm_ptr is not None:
                numbers, more = _narrow_dots.normed(numbers, norm)
                squares += more
                if K > BLOCK_K:
                    norm = _vector(norm_ptr, k + BLOCK_K, K, BLOCK_K, SPAN, DOTS)
            if CODE == "e4m3":
                halved = _narrow_halves.halved(numbers)
                sums = _narrow_halves.add(sums, words, scales, halved, FORM)
                if is_gated:
                    sums_up = _narrow_halves.add(sums_up, words_up, scales_up, halved, FORM)
            else:
                fixed = _narrow_dots.fixed(numbers, CODE)
                sums = _narrow_dots.add(sums, words, scales, zeros, fixed, table, FORM, CODE)
                if is_gated:
                    sums_up = _narrow_dots.add(sums_up, words_up, scales_up, zeros_up, fixed, table, FORM, CODE)
        else:
            numbers = x.to(tl.float32)
            if x_scales_ptr is not None and FORM == "blocks":
                cols = k + tl.arange(0, BLOCK_K)
                x_scales_ptrs = x_scales_ptr + token * x_scale_row + cols // 128 * x_scale_block
                numbers = x.to(tl.float32) * tl.load(x_scales_ptrs, mask=cols < K, other=0.0)
            if norm_ptr is not None:
                wide = x.to(tl.float32)
                squares += wide * wide
                numbers = wide * norm.to(tl.float32)
                if K > BLOCK_K:
                    norm = _vector(norm_ptr, k + BLOCK_K, K, BLOCK_K, SPAN, DOTS)
            placed = _by_place(numbers, PER)
            if CODE == "int4" or CODE == "int8":
                every = _every(placed, PER, UNIT)
                total += every
            sums = _add(sums, words, scales, zeros, placed, every, FORM, CODE, PER)
            if is_gated:
                sums_up = _add(sums_up, words_up, scales_up, zeros_up, placed, every, FORM, CODE, PER)
        if is_gated and K > BLOCK_K:
            words_up, scales_up, zeros_up = _weight(
                weight_ptr, scales_ptr, zeros_ptr, first + N, expert, k + BLOCK_K,
                K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if K > BLOCK_K:
            words, scales, zeros, x = next_words, next_scales, next_zeros, next_x
    factor = 1.0 if DOTS else _unit(CODE)
    if norm_ptr is not None:
        factor *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if x_scales_ptr is not None and FORM == "rows":
        factor *= tl.load(x_scales_ptr + token * x_scale_row)
    if FORM == "rows" and CODE == "int8" and not DOTS:
        sums -= (total * BYTE)[None, :]
        sums_up -= (total * BYTE)[None, :]
    out = tl.sum(sums, 1) * factor * row_scales + bias
    if is_gated:
        up = tl.sum(sums_up, 1) * factor * row_scales_up + bias_up
        out = gated(out, up, ACTIVATION)
    if ADD:
        out += residual.to(tl.float32)
    tl.store(target, out.to(out_ptr.dtype.element_ty))

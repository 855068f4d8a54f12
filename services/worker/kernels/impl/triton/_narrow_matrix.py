"""Products with weights of 8 and 4 bits on matrix units, for rows of a step and for rows sorted by expert.

The weight is the left operand: its many rows fill the matrix unit however few rows x has. x is 8 bits wide with its own
scales (then both go into the unit as they are) or as wide as the activations (then the weight is widened in registers).
Rows of a mixture come by the plan of `_moe_sort`; else with PARTS > 1 programs own parts of K (`_dense_matrix`).
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._moe_sort import TABLE_START
from services.worker.kernels.impl.triton._narrow import column, gated, row_start, scale_column, scale_start
from services.worker.kernels.impl.triton._narrow_dots import backend


@triton.jit
def _halves(packed, base, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of the lower and the upper halves of bytes, less `base`; exact.

    Behind a set exponent four bits are a float: 128 + n in bf16, 1024 + n in fp16 (`base` has that, too).
    """
    bits = packed.to(tl.int16)
    return _floats(bits & 15, dtype) - base, _floats(bits >> 4, dtype) - base


@triton.jit
def _floats(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if dtype == tl.bfloat16:
        return (bits | 0x4300).to(tl.int16).to(dtype, bitcast=True)
    elif dtype == tl.float16:
        return (bits | 0x6400).to(tl.int16).to(dtype, bitcast=True)
    else:
        return bits.to(dtype)


@triton.jit
def _quarters(words, base, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_halves`, the four numbers of words of 16 bits."""
    if backend() == "cuda" and dtype == tl.bfloat16:  # two words an instruction
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 s;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 s, $4, 4; lop3.b32 $1, s, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 s, $4, 8; lop3.b32 $2, s, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 s, $4, 12; lop3.b32 $3, s, 0x000F000F, 0x43004300, 0xEA; }""",
            "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = _floats(words & 15, dtype), _floats((words >> 4) & 15, dtype)
        third, fourth = _floats((words >> 8) & 15, dtype), _floats((words >> 12) & 15, dtype)
    return first - base, second - base, third - base, fourth - base


@triton.jit
def _e2m1_quarters(words, scales):  # type: ignore[no-untyped-def]
    """The four numbers of words of 16 bits, scaled, but for 2^63: bf16, exact from 2^-63 to 2^64.

    Behind their sign four bits are a float, 2^-126 as large.
    """
    powers = ((tl.minimum(scales.to(tl.int32), 191) + 63) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    powers = tl.broadcast_to(powers[:, :, None], [words.shape[0], scales.shape[1], 8])
    powers = tl.reshape(powers, [words.shape[0], words.shape[1]])
    if backend() == "cuda":  # two words an instruction, where the compiler would take them one by one
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 s, t;
            shl.b32 s, $4, 6; and.b32 s, s, 0x01C001C0; shl.b32 t, $4, 12; lop3.b32 $0, t, 0x80008000, s, 0xEA;
            shl.b32 s, $4, 2; and.b32 s, s, 0x01C001C0; shl.b32 t, $4, 8; lop3.b32 $1, t, 0x80008000, s, 0xEA;
            shr.u32 s, $4, 2; and.b32 s, s, 0x01C001C0; shl.b32 t, $4, 4; lop3.b32 $2, t, 0x80008000, s, 0xEA;
            shr.u32 s, $4, 6; and.b32 s, s, 0x01C001C0; lop3.b32 $3, $4, 0x80008000, s, 0xEA; }""",
            "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return first * powers, second * powers, third * powers, fourth * powers
    else:  # the interpreter cannot multiply bf16
        bits, wide = words.to(tl.int32), powers.to(tl.float32)
        first = (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True)
        second = (((bits & 0x70) << 18) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        third = (((bits & 0x700) << 14) | ((bits & 0x800) << 20)).to(tl.float32, bitcast=True)
        fourth = (((bits & 0x7000) << 10) | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)
        return first * wide, second * wide, third * wide, fourth * wide


@triton.jit
def _e4m3_halves(words):  # type: ignore[no-untyped-def]
    """The lower and the upper numbers of words of 16 bits in bf16; exact.

    Behind their sign seven bits are a float, 2^-120 as large.
    """
    if backend() == "cuda":  # two words an instruction
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 s, t;
            shl.b32 s, $2, 4; and.b32 s, s, 0x07F007F0; shl.b32 t, $2, 8; lop3.b32 $0, t, 0x80008000, s, 0xEA;
            shr.u32 s, $2, 4; and.b32 s, s, 0x07F007F0; lop3.b32 $1, $2, 0x80008000, s, 0xEA; }""",
            "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return low * 2.0**120, high * 2.0**120
    else:  # the interpreter cannot multiply bf16
        bits = words.to(tl.int32)
        low = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        high = (((bits & 0x7F00) << 12) | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)
        return low * 2.0**120, high * 2.0**120


@triton.jit
def _by_halves(numbers, x, sums):  # type: ignore[no-untyped-def]
    """sums + the products of every second column, twice."""
    even, odd = tl.split(tl.reshape(x.to(numbers[0].dtype), [x.shape[0], x.shape[1] // 2, 2]))
    sums = tl.dot(numbers[0], tl.trans(even), sums, input_precision="ieee")
    return tl.dot(numbers[1], tl.trans(odd), sums, input_precision="ieee")


@triton.jit
def _by_planes(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x's columns, every COUNT-th from each of the first COUNT on. They cross threads, by way of shared memory."""
    apart = tl.reshape(x, [x.shape[0], x.shape[1] // COUNT, COUNT])
    return tl.reshape(tl.permute(apart, (0, 2, 1)), [x.shape[0], x.shape[1]])


@triton.jit
def _by_words(numbers, x, sums):  # type: ignore[no-untyped-def]
    """sums + the products of the first, second .. numbers of words, and x by planes: one product, for which no number
    leaves its thread, since a unit takes as many columns from a thread as a word has.
    """
    if len(numbers) == 2:
        tile = tl.permute(tl.join(numbers[0], numbers[1]), (0, 2, 1))
    else:
        tile = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
        tile = tl.permute(tile, (0, 2, 3, 1))
    tile = tl.reshape(tile, [numbers[0].shape[0], x.shape[1]])
    return tl.dot(tile, tl.trans(x.to(tile.dtype)), sums, input_precision="ieee")


@triton.jit
def _widened(tile, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """8 bits as `dtype`, exact. By way of fp32: from fp16 to bf16 a GPU has a sixteenth of its rate."""
    if tile.dtype == dtype:
        return tile
    elif dtype == tl.bfloat16:
        return tile.to(tl.float32).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit
def _bring(pointers):  # type: ignore[no-untyped-def]
    """Asks for what lies there: it is too small for the way that tiles come, and the first step would wait for it."""
    if backend() == "cuda":
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    sums, starts, scale_starts, zero_starts, x, x_scales, k,
    K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_M] + the product with columns k .. k + BLOCK_K.

    starts, scale_starts, zero_starts: pointers to each row's first, [BLOCK_N]. x: [BLOCK_M, BLOCK_K], as stored,
    beside words by planes.
    """
    WORDS: tl.constexpr = starts.dtype.element_ty == tl.int16
    BITS: tl.constexpr = 4 if FORM == "mxfp4" or FORM == "int4" else 8
    PACKED: tl.constexpr = (16 if WORDS else 8) // BITS
    cols = k // PACKED + tl.arange(0, BLOCK_K // PACKED)
    tile_ptrs = starts[:, None] + column(cols, TILED, 8 if WORDS else 16)[None, :]
    if K % BLOCK_K == 0:
        tile = tl.load(tile_ptrs)
    else:
        tile = tl.load(tile_ptrs, mask=(cols < K // PACKED)[None, :], other=0.0)
    if FORM == "mxfp4" or FORM == "mxfp8":
        first = k + tl.arange(0, BLOCK_K // 32) * 32
        scale_ptrs = scale_starts[:, None] + scale_column(first, FORM, GROUP, TILED)[None, :]
        scales = tl.load(scale_ptrs, mask=(first < K)[None, :], other=0)
        weight_form: tl.constexpr = "e2m1" if FORM == "mxfp4" else "e4m3"
        if WORDS:
            sums = _by_words(_e2m1_quarters(tile, scales), x, sums)
        elif x_scales is None:
            x_form: tl.constexpr = "fp16" if x.dtype == tl.float16 else "bf16"
            sums = tl.dot_scaled(tile, scales, weight_form, tl.trans(x), None, x_form, sums)
        else:
            sums = tl.dot_scaled(tile, scales, weight_form, tl.trans(x), x_scales, weight_form, sums)
    elif FORM == "rows" and WORDS:
        sums = _by_words(_e4m3_halves(tile), x, sums)
    elif FORM == "rows":
        sums = tl.dot(
            _widened(tile, x.dtype), tl.trans(x), sums, input_precision="ieee", out_dtype=sums.dtype,
            max_num_imprecise_acc=EXACT if EXACT else None,
        )  # fmt: skip
    else:
        # a step has one group: its scale is a number per row
        scale = tl.load(scale_starts + k // GROUP).to(tl.float32)[:, None]
        if FORM == "int4":
            base: tl.constexpr = 128.0 if x.dtype == tl.bfloat16 else (1024.0 if x.dtype == tl.float16 else 0.0)
            zero = tl.full([tile.shape[0], 1], 8.0 + base, tl.float32)
            if zero_starts is not None:
                zero = tl.load(zero_starts + k // GROUP).to(tl.float32)[:, None] + base
            if WORDS:
                part = _by_words(_quarters(tile, zero.to(x.dtype), x.dtype), x, tl.zeros(sums.shape, tl.float32))
            else:
                part = _by_halves(_halves(tile, zero.to(x.dtype), x.dtype), x, tl.zeros(sums.shape, tl.float32))
        else:
            if WORDS:
                part = _by_words(_e4m3_halves(tile), x, tl.zeros(sums.shape, tl.float32))
            else:
                part = tl.dot(_widened(tile, x.dtype), tl.trans(x), input_precision="ieee")
            if x_scales is not None:
                scale = scale * x_scales[None, :]
        sums += part * scale
    return sums


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    out, up, squares, bias, bias_up, target, mask, eps,
    K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The epilogue. out, up, target, mask: [BLOCK_N, BLOCK_M]; squares: [BLOCK_M]; biases: [BLOCK_N, 1] or 0."""
    if NORM:
        factor = tl.rsqrt(squares / K + eps)[None, :]
        out *= factor
        up *= factor
    out += bias
    if ACTIVATION != "":
        out = gated(out, up + bias_up, ACTIVATION)
    if ADD:
        out += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, out.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "ids_start"])
def narrow_matrix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scales_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    plan_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    eps,
    M,
    N,
    ids_start,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    PLANES: tl.constexpr,
    OUT_PLANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, N] = epilogue(rms_norm(x) @ weight.T + bias), sums in fp32. Grid: (blocks of outputs and rows, PARTS).

    x: [M, K], or with a plan [M / TOP_K, K]; x_scales: fp32, x_scale_row apart and with blocks x_scale_block, None for
    wide x; norm: [K], only for wide x; weight, scales, zeros: see `_narrow`, of [N, K], with an ACTIVATION [2 N, K],
    gate rows first, one below the other for each expert; bias: a number per weight row; with ADD out is what the
    product is added to. parts, arrived: see `_dense_matrix`. plan: see `_moe_sort`, M pairs; None: rows as they are.
    Numbers of four bits and e4m3 may come as words of 16, beside wide x.
    PLANES: of each BLOCK_K columns of x every fourth one stands first, then every fourth from the second on, and so on;
    for words of four bits, whole steps, no norm. OUT_PLANES: the columns of such a step by which out is to lie; 0: not.
    EXACT: columns whose sum a unit of 8 bits may keep in its own precision (some 14 bits on an H200); 0: all.
    """
    columns = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    is_gated: tl.constexpr = ACTIVATION != ""
    release(PDL)
    if plan_ptr is None:
        blocks = tl.cdiv(M, BLOCK_M)
    else:
        wait(PDL)
        blocks = tl.load(plan_ptr)
    if program < blocks * columns:
        within = program % (GROUP_M * columns)
        first = program // (GROUP_M * columns) * GROUP_M
        together = tl.minimum(blocks - first, GROUP_M)
        block = first + within % together
        block_n = within // together
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        expert = 0
        if plan_ptr is not None:
            expert = tl.load(plan_ptr + TABLE_START + block).to(tl.int64)
            m = tl.load(plan_ptr + ids_start + m)
        real = m < M
        m = m.to(tl.int64)
        token = tl.minimum(m, M - 1) // TOP_K
        n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows past the end read the last one again: no mask in the loop
        row = tl.minimum(n, N - 1).to(tl.int64) + expert * N * (2 if is_gated else 1)
        row_up = row + N
        WORDS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int16
        starts = weight_ptr + row_start(row, K, FORM, TILED, 8 if WORDS else 16)
        scale_starts = scales_ptr + scale_start(row, expert, K, FORM, GROUP, ROW_SCALE, TILED)
        zero_starts = zeros_ptr
        if zeros_ptr is not None:
            zero_starts = zeros_ptr + scale_start(row, expert, K, FORM, GROUP, ROW_SCALE, TILED)
        starts_up = weight_ptr + row_start(row_up, K, FORM, TILED, 8 if WORDS else 16)
        scale_starts_up = scales_ptr + scale_start(row_up, expert, K, FORM, GROUP, ROW_SCALE, TILED)
        zero_starts_up = zeros_ptr
        if zeros_ptr is not None:
            zero_starts_up = zeros_ptr + scale_start(row_up, expert, K, FORM, GROUP, ROW_SCALE, TILED)
        bias = 0.0
        bias_up = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + row).to(tl.float32)[:, None]
            if is_gated:
                bias_up = tl.load(bias_ptr + row_up).to(tl.float32)[:, None]
        weight_scale = 1.0
        weight_scale_up = 1.0
        if FORM == "rows":
            weight_scale = tl.load(scale_starts).to(tl.float32)[:, None]
            if is_gated:
                weight_scale_up = tl.load(scale_starts_up).to(tl.float32)[:, None]
        kind: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
        sums = tl.zeros([BLOCK_N, BLOCK_M], kind)
        sums_up = tl.zeros([BLOCK_N, BLOCK_M], kind)
        squares = tl.zeros([BLOCK_M], tl.float32)
        span: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K  # columns per part
        start = tl.program_id(1) * span
        PACKED_X: tl.constexpr = 2 if FORM == "mxfp4" and x_scales_ptr is not None else 1
        x_starts = x_ptr + token * (K // PACKED_X)
        if FORM != "rows":
            _bring(scale_starts + scale_column(start, FORM, GROUP, TILED))
            if zeros_ptr is not None:
                _bring(zero_starts + start // GROUP)
            if is_gated:
                _bring(scale_starts_up + scale_column(start, FORM, GROUP, TILED))
                if zeros_ptr is not None:
                    _bring(zero_starts_up + start // GROUP)
        if plan_ptr is None:
            wait(PDL)
        for step in tl.range(0, span, BLOCK_K, num_stages=STAGES):
            k = start + step
            cols = k // PACKED_X + tl.arange(0, BLOCK_K // PACKED_X)
            x_mask = real[:, None] if K % (BLOCK_K * PARTS) == 0 else real[:, None] & (cols < K // PACKED_X)[None, :]
            x = tl.load(x_starts[:, None] + cols[None, :], mask=x_mask, other=0.0)
            x_scales = None
            if x_scales_ptr is not None:
                if FORM == "blocks":
                    x_scales = tl.load(x_scales_ptr + token * x_scale_row + k // 128 * x_scale_block)
                elif FORM != "rows":
                    groups = k + tl.arange(0, BLOCK_K // 32) * 32
                    x_scale_starts = x_scales_ptr + scale_start(token, 0, K, FORM, GROUP, ROW_SCALE, TILED)
                    x_scales = tl.load(
                        x_scale_starts[:, None] + scale_column(groups, FORM, GROUP, TILED)[None, :],
                        mask=real[:, None] & (groups < K)[None, :], other=0.0,
                    )  # fmt: skip
            if norm_ptr is not None:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                x = (wide * tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
            if WORDS and not PLANES:
                x = _by_planes(x, 4 if FORM == "int4" or FORM == "mxfp4" else 2)
            sums = _step(sums, starts, scale_starts, zero_starts, x, x_scales, k, K, FORM, GROUP, TILED, BLOCK_K, EXACT)
            if is_gated:
                sums_up = _step(
                    sums_up, starts_up, scale_starts_up, zero_starts_up, x, x_scales, k,
                    K, FORM, GROUP, TILED, BLOCK_K, EXACT,
                )  # fmt: skip
        if FORM == "mxfp4" and WORDS:
            weight_scale = 2.0**63
            weight_scale_up = 2.0**63
        out = sums.to(tl.float32) * weight_scale
        up = sums_up.to(tl.float32) * weight_scale_up
        if x_scales_ptr is not None and FORM == "rows":
            x_scale = tl.load(x_scales_ptr + token * x_scale_row)[None, :]
            out *= x_scale
            up *= x_scale
        place = n
        if OUT_PLANES > 0:
            place = n // OUT_PLANES * OUT_PLANES + n % 4 * (OUT_PLANES // 4) + n % OUT_PLANES // 4
        target = out_ptr + m[None, :] * N + place[:, None]
        mask = real[None, :] & (n < N)[:, None]
        NORM: tl.constexpr = norm_ptr is not None
        if PARTS == 1:
            _finish(out, up, squares, bias, bias_up, target, mask, eps, K, NORM, ADD, ACTIVATION)
        else:
            size: tl.constexpr = BLOCK_N * BLOCK_M
            stride: tl.constexpr = size * (2 if is_gated else 1) + BLOCK_M
            places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            block_ptr = parts_ptr + program * (PARTS * stride)
            part_ptr = block_ptr + tl.program_id(1) * stride
            tl.store(part_ptr + BLOCK_M + places, out)
            if is_gated:
                tl.store(part_ptr + BLOCK_M + size + places, up)
            if NORM:
                tl.store(part_ptr + tl.arange(0, BLOCK_M), squares)
            tl.debug_barrier()  # one thread announces what all have written
            arrived = tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel")
            if arrived == PARTS - 1:
                out = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                squares = tl.zeros([BLOCK_M], tl.float32)
                for part in tl.range(0, PARTS, num_stages=1):
                    # past L1, which other processors' writes do not reach
                    out += tl.load(block_ptr + part * stride + BLOCK_M + places, cache_modifier=".cg")
                    if is_gated:
                        up += tl.load(block_ptr + part * stride + BLOCK_M + size + places, cache_modifier=".cg")
                    if NORM:
                        squares += tl.load(
                            block_ptr + part * stride + tl.arange(0, BLOCK_M), cache_modifier=".cg"
                        )  # fmt: skip
                _finish(out, up, squares, bias, bias_up, target, mask, eps, K, NORM, ADD, ACTIVATION)
                tl.store(arrived_ptr + program, 0)

"""Products of one row with weights of 8 and 4 bits by programs that go through several blocks of outputs.

As `_narrow_vector` with DOTS, but a program has all of K at once, prepares x once, and asks for the next block's weight
before it multiplies with this one's. So few and small programs keep memory busy, and half of a processor is left to
the next kernel, whose programs have their first weights when this one ends.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _narrow_dots, _narrow_halves
from services.worker.kernels.impl.triton._launch import release, wait
from services.worker.kernels.impl.triton._narrow import gated
from services.worker.kernels.impl.triton._narrow_vector import _weight, small


@triton.jit
def _sums(words, scales, zeros, x, table, FORM: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of a block, [BLOCK_N], with x as `_narrow_dots.fixed` or `_narrow_halves.halved` gives it."""
    nothing = tl.zeros([words.shape[0], words.shape[1] // 4], tl.float32)
    if CODE == "e4m3":
        return tl.sum(_narrow_halves.add(nothing, words, scales, x, FORM), 1)
    else:
        return tl.sum(_narrow_dots.add(nothing, words, scales, zeros, x, table, FORM, CODE), 1)


@triton.jit(do_not_specialize=["N"])
def narrow_stream_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scales_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    FORM: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    TILED: tl.constexpr,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [1, N] = epilogue(rms_norm(x) @ weight.T + bias), sums in fp32. Grid: N / (BLOCK_N BLOCKS).

    The arguments are those of `narrow_vector_kernel`. BLOCK_K >= K, a multiple of a thread's columns.
    """
    PER: tl.constexpr = 8 if CODE == "int4" or CODE == "e2m1" else 4
    SPAN: tl.constexpr = 4 * PER
    is_gated: tl.constexpr = ACTIVATION != ""
    first = tl.program_id(0).to(tl.int64) * (BLOCK_N * BLOCKS)
    release(PDL)
    words, scales, zeros = _weight(
        weight_ptr, scales_ptr, zeros_ptr, first, 0, 0, K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K
    )  # fmt: skip
    row_scales, bias = small(scales_ptr, bias_ptr, first, 0, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N)
    if is_gated:
        words_up, scales_up, zeros_up = _weight(
            weight_ptr, scales_ptr, zeros_ptr, first + N, 0, 0, K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K
        )  # fmt: skip
        row_scales_up, bias_up = small(scales_ptr, bias_ptr, first + N, 0, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N)
    if norm_ptr is not None:
        norm = _narrow_dots.pieces(norm_ptr, 0, K, BLOCK_K, SPAN)
    wait(PDL)
    numbers = _narrow_dots.wide(_narrow_dots.pieces(x_ptr, 0, K, BLOCK_K, SPAN))
    factor = 1.0
    if x_scales_ptr is not None:
        factor = tl.load(x_scales_ptr)
    at = out_ptr + first + tl.arange(0, BLOCK_N)
    if ADD:
        residual = tl.load(at)
    if norm_ptr is not None:
        numbers, squares = _narrow_dots.normed(numbers, norm)
        factor *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if CODE == "e4m3":
        x = _narrow_halves.halved(numbers)
    else:
        x = _narrow_dots.fixed(numbers, CODE)
    table = _narrow_dots.tables(N >> 31)
    for block in tl.range(0, BLOCKS, num_stages=1):
        # behind the last block nothing is asked for that is masked by its columns
        past = tl.where(block + 1 < BLOCKS, 0, BLOCK_K)
        first = tl.where(block + 1 < BLOCKS, first + BLOCK_N, first)
        next_words, next_scales, next_zeros = _weight(
            weight_ptr, scales_ptr, zeros_ptr, first, 0, past, K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K
        )  # fmt: skip
        next_row_scales, next_bias = small(scales_ptr, bias_ptr, first, 0, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N)
        if is_gated:
            next_words_up, next_scales_up, next_zeros_up = _weight(
                weight_ptr, scales_ptr, zeros_ptr, first + N, 0, past,
                K, FORM, GROUP, TILED, PER, SPAN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            next_row_scales_up, next_bias_up = small(
                scales_ptr, bias_ptr, first + N, 0, K, FORM, GROUP, ROW_SCALE, TILED, BLOCK_N
            )  # fmt: skip
        if ADD:
            next_residual = tl.load(out_ptr + first + tl.arange(0, BLOCK_N))
        out = _sums(words, scales, zeros, x, table, FORM, CODE) * factor * row_scales + bias
        if is_gated:
            up = _sums(words_up, scales_up, zeros_up, x, table, FORM, CODE) * factor * row_scales_up + bias_up
            out = gated(out, up, ACTIVATION)
        if ADD:
            out += residual.to(tl.float32)
        tl.store(at, out.to(out_ptr.dtype.element_ty))
        at += BLOCK_N
        words, scales, zeros, row_scales, bias = next_words, next_scales, next_zeros, next_row_scales, next_bias
        if is_gated:
            words_up, scales_up, zeros_up = next_words_up, next_scales_up, next_zeros_up
            row_scales_up, bias_up = next_row_scales_up, next_bias_up
        if ADD:
            residual = next_residual

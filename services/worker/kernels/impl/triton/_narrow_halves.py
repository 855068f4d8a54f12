"""One row's product with numbers of e4m3 in halves: two weights an instruction, widened by the GPU's own conversion.

x becomes fp16 by a power of two for each unit of SPAN columns, a thread's 16 bytes of a row, so that its largest number
is from 8 to 16: bf16 stays what it was down to 2^-18 of the largest. A unit's products are summed in fp16, eight in
each half of a word, no more than 57344; that is off by some 2^-11 of them, less than bf16's rounding of x. fp32 takes
over with the unit's scale.
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._narrow_dots import backend, largest_of, quarters

EXPONENT = tl.constexpr(0x7F800000)
EIGHT = tl.constexpr(3 << 23)  # times 8, as bits


@triton.jit
def _pair(first, second):  # type: ignore[no-untyped-def]
    """Two fp32 as fp16 in a word, the first below."""
    if backend() == "cuda":
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _words(part, factor):  # type: ignore[no-untyped-def]
    """A piece [units, 8] times factor [units]: four words of two numbers."""
    numbers = part * factor[:, None]
    first, second = tl.split(tl.reshape(numbers, [numbers.shape[0], 2, 2, 2]))
    even, odd = tl.split(_pair(first, second))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def halved(parts):  # type: ignore[no-untyped-def]
    """What `add` multiplies with: both pieces of units as words, and what a unit's numbers count."""
    bits = largest_of(parts).to(tl.int32, bitcast=True) & EXPONENT
    factor = ((254 << 23) - bits + EIGHT).to(tl.float32, bitcast=True)
    unit = (bits - EIGHT).to(tl.float32, bitcast=True)
    return _words(parts[0], factor), _words(parts[1], factor), unit


@triton.jit
def _e4m3(bits):  # type: ignore[no-untyped-def]
    """A number in bits 0 to 7, as fp32."""
    wide = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    return wide.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _plain(word, pair):  # type: ignore[no-untyped-def]
    """The products of a word's first and second number with those of a pair of x, fp32."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return _e4m3(word & 0xFF) * low + _e4m3((word >> 8) & 0xFF) * high


@triton.jit
def _product(words, a, b):  # type: ignore[no-untyped-def]
    """Four words' products with both pieces of x, summed: fp32, in units."""
    if backend() == "cuda":
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h; .reg .b32 w, s; .reg .f32 f;
            mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 w, l; mul.rn.f16x2 s, w, $5;
            cvt.rn.f16x2.e4m3x2 w, h; fma.rn.f16x2 s, w, $6, s;
            mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 w, l; fma.rn.f16x2 s, w, $7, s;
            cvt.rn.f16x2.e4m3x2 w, h; fma.rn.f16x2 s, w, $8, s;
            mov.b32 {l, h}, $3; cvt.rn.f16x2.e4m3x2 w, l; fma.rn.f16x2 s, w, $9, s;
            cvt.rn.f16x2.e4m3x2 w, h; fma.rn.f16x2 s, w, $10, s;
            mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 w, l; fma.rn.f16x2 s, w, $11, s;
            cvt.rn.f16x2.e4m3x2 w, h; fma.rn.f16x2 s, w, $12, s;
            mov.b32 {l, h}, s; cvt.f32.f16 $0, l; cvt.f32.f16 f, h; add.f32 $0, $0, f; }""",
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [words[0], words[1], words[2], words[3], a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = tl.zeros(words[0].shape, tl.float32)
        for i in tl.static_range(2):
            total += _plain(words[i], a[2 * i]) + _plain(words[i] >> 16, a[2 * i + 1])
            total += _plain(words[2 + i], b[2 * i]) + _plain(words[2 + i] >> 16, b[2 * i + 1])
        return total


@triton.jit
def add(sums, words, scales, x, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums [rows, units] + the products of words [rows, units * 4] and x (`halved`), scaled."""
    a, b, unit = x
    a = (a[0][None, :], a[1][None, :], a[2][None, :], a[3][None, :])
    b = (b[0][None, :], b[1][None, :], b[2][None, :], b[3][None, :])
    factor = unit[None, :]
    if FORM != "rows":
        factor = factor * scales
    return sums + _product(quarters(words), a, b) * factor

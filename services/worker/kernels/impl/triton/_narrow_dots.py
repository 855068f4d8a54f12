"""One row's product with numbers of 4 and 8 bits as integers, by dots of four bytes: half the instructions of floats.

x becomes fixed point of 16 bits, in units of SPAN columns, a thread's for 16 bytes of a row; it is off by 2^-16 of the
unit's largest, less than bf16 is. Upper and lower bytes, both signed, are multiplied apart. A unit has one scale
of the weight, so that a float is made once for SPAN columns of a row. Zero points take off the unit's sum of x.
"""

from typing import Any

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._narrow import power

LARGEST = tl.constexpr(32600.0)  # of fixed point, with room for the lower byte's carry
ROUND = tl.constexpr(1.5 * 2.0**23 + 2.0**15)  # added: a number's lower 16 bits are an integer's, counted from -2^15
E2M1_BASE = tl.constexpr(64)
# less E2M1_BASE, as bytes: 0, 1, 2, 3 and 4, 6, 8, 12, and their negatives
PLUS, MINUS = tl.constexpr((-0x3C3D3E40, -0x3337393C)), tl.constexpr((-0x42414040, -0x4B474544))
SIGNS = tl.constexpr(-0x77777778)  # of e2m1, in a word
PIECE = tl.constexpr(8)  # columns of a load of x


def backend(_semantic: Any = None) -> Any:
    """The name of what a kernel is compiled for: "cuda", "hip", or "interpreter"."""
    return tl.constexpr("interpreter" if _semantic is None else _semantic.builder.options.backend_name)


backend.__triton_builtin__ = True  # type: ignore[attr-defined]


@tl.core.extern
def _amd_dot4(a: Any, b: Any, total: Any, clamp: Any, _semantic: Any = None) -> Any:
    """The compiler's own: behind an inline `v_dot4_i32_i8` it would not know how long the result takes."""
    kinds = (tl.int32, tl.int32, tl.int32, tl.int1)
    known = {kinds: ("llvm.amdgcn.sdot4", tl.int32)}
    return tl.core.extern_elementwise("", "", [a, b, total, clamp], known, is_pure=True, _semantic=_semantic)


@tl.core.extern
def _amd_perm(upper: Any, lower: Any, places: Any, _semantic: Any = None) -> Any:
    """Bytes of lower (0 to 3) and upper (4 to 7), one for each byte of `places`."""
    known = {(tl.int32, tl.int32, tl.int32): ("llvm.amdgcn.perm", tl.int32)}
    return tl.core.extern_elementwise("", "", [upper, lower, places], known, is_pure=True, _semantic=_semantic)


@triton.jit
def dot4(a, b, total):  # type: ignore[no-untyped-def]
    """total + the products of the signed bytes of a and b, which are int32 like it."""
    if backend() == "cuda":
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    elif backend() == "hip":
        return _amd_dot4(a, b, total, False)
    else:
        for i in tl.static_range(0, 32, 8):
            total += ((a << (24 - i)) >> 24) * ((b << (24 - i)) >> 24)
        return total


@triton.jit
def pieces(pointer, k, K: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers k .. k + BLOCK_K of a vector, as stored: for each PIECE of a unit all units', [BLOCK_K / SPAN, PIECE]."""
    units = k + tl.arange(0, BLOCK_K // SPAN) * SPAN
    cols = units[:, None] + tl.arange(0, PIECE)[None, :]
    start = tl.max_contiguous(pointer + cols, (1, PIECE))
    mask = k < K if K % BLOCK_K == 0 else cols < K  # SPAN divides K; a step past the end requests nothing
    first, second = tl.load(start, mask, 0.0), tl.load(start + PIECE, mask, 0.0)
    if SPAN == 2 * PIECE:
        return first, second
    else:
        return first, second, tl.load(start + 2 * PIECE, mask, 0.0), tl.load(start + 3 * PIECE, mask, 0.0)


@triton.jit
def normed(parts, norm):  # type: ignore[no-untyped-def]
    """parts * norm and the sums of squares of parts, by unit; all as `pieces`, the first fp32."""
    squares = parts[0] * parts[0]
    for i in tl.static_range(1, len(parts)):
        squares += parts[i] * parts[i]
    squares = tl.sum(squares, 1)
    first, second = parts[0] * norm[0].to(tl.float32), parts[1] * norm[1].to(tl.float32)
    if len(parts) == 2:
        return (first, second), squares
    else:
        return (first, second, parts[2] * norm[2].to(tl.float32), parts[3] * norm[3].to(tl.float32)), squares


@triton.jit
def wide(parts):  # type: ignore[no-untyped-def]
    """As fp32."""
    if len(parts) == 2:
        return parts[0].to(tl.float32), parts[1].to(tl.float32)
    else:
        return parts[0].to(tl.float32), parts[1].to(tl.float32), parts[2].to(tl.float32), parts[3].to(tl.float32)


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def picked(a, b, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four bytes of a (0 to 3) and b (4 to 7): a hexadecimal digit of PLACES for each, the lowest byte's last."""
    if backend() == "cuda":
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {PLACES};", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:  # as one instruction where there is one
        out = a & 0
        for i in tl.static_range(4):
            if (PLACES >> (4 * i)) & 4:
                out |= ((b >> (8 * ((PLACES >> (4 * i)) & 3))) & 255) << (8 * i)
            else:
                out |= ((a >> (8 * ((PLACES >> (4 * i)) & 3))) & 255) << (8 * i)
        return out


@triton.jit
def tables(nothing):  # type: ignore[no-untyped-def]
    """Bytes that numbers of e2m1 stand for, see `_e2m1`. `nothing`: 0, which the compiler must not know, for it would
    make constants anew before each use.
    """
    return nothing + PLUS[0], nothing + PLUS[1], nothing + MINUS[0], nothing + MINUS[1]


@triton.jit
def _e2m1(words, table):  # type: ignore[no-untyped-def]
    """Twice the numbers less E2M1_BASE, as bytes: of the first and the last four, on AMD of the even and the odd."""
    if backend() == "cuda":
        turned = words ^ SIGNS
        return _e2m1_four(words, turned, table), _e2m1_four(words >> 16, turned >> 16, table)
    elif backend() == "hip":
        return _e2m1_even(words, table), _e2m1_even(words >> 4, table)
    else:
        first, second = words & 0, words & 0
        for i in tl.static_range(4):
            first |= _e2m1_one(words >> (4 * i)) << (8 * i)
            second |= _e2m1_one(words >> (4 * i + 16)) << (8 * i)
        return first, second


@triton.jit
def _e2m1_four(words, turned, table):  # type: ignore[no-untyped-def]
    """A selector's highest bit asks for the sign of a byte, and all are negative: 255, which leaves the other one."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 above, below;
        prmt.b32 above, $3, $4, $1; prmt.b32 below, $5, $6, $2; and.b32 $0, above, below; }""",
        "=r,r,r,r,r,r,r", [words, turned, table[0], table[1], table[2], table[3]], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _e2m1_even(words, table):  # type: ignore[no-untyped-def]
    code = words & 0x07070707
    above, below = _amd_perm(table[1], table[0], code), _amd_perm(table[3], table[2], code)
    # 12 asks for 0, 13 for 255
    negative = _amd_perm(words, words, ((words >> 3) & 0x01010101) | 0x0C0C0C0C)
    return (below & negative) | (above & ~negative)


@triton.jit
def _e2m1_one(bits):  # type: ignore[no-untyped-def]
    twice = ((bits & 0).to(tl.int64) + 0xC8643210 >> (4 * (bits & 7)).to(tl.int64)).to(tl.int32) & 15
    return (tl.where((bits & 8) != 0, -twice, twice) - E2M1_BASE) & 255


@triton.jit
def _packed(a, b, c, d):  # type: ignore[no-untyped-def]
    """The upper and the lower bytes of four numbers from -2^15; a lower one counts from -128, which the upper knows."""
    first, second = picked(a, b, 0x5410), picked(c, d, 0x5410)
    high = picked(first + 0x00800080, second + 0x00800080, 0x7531)
    return high ^ -0x7F7F7F80, picked(first, second, 0x6420)


@triton.jit
def _fixed(part, factor, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A piece in fixed point: bytes (high, low) beside the first and the second four that `add` takes."""
    numbers = (part * factor[:, None] + ROUND).to(tl.int32, bitcast=True)
    first, second = tl.split(tl.reshape(numbers, [numbers.shape[0], 2, 2, 2]))
    a, c = tl.split(first)
    b, d = tl.split(second)
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(c)
    x1, x5 = tl.split(b)
    x3, x7 = tl.split(d)
    if CODE == "int4" or (CODE == "e2m1" and backend() == "hip"):
        return _packed(x0, x2, x4, x6), _packed(x1, x3, x5, x7)
    else:
        return _packed(x0, x1, x2, x3), _packed(x4, x5, x6, x7)


@triton.jit
def largest_of(parts):  # type: ignore[no-untyped-def]
    """Of each unit, as pieces; never 0."""
    largest = tl.abs(parts[0])
    for i in tl.static_range(1, len(parts)):
        largest = _larger(largest, tl.abs(parts[i]))
    return _larger(tl.reduce(largest, 1, _larger), 1e-30)


@triton.jit
def fixed(parts, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `add` multiplies with: pieces in fixed point, their sums, and what a unit's integers count."""
    largest = largest_of(parts)
    factor = LARGEST / largest
    first, second = _fixed(parts[0], factor, CODE), _fixed(parts[1], factor, CODE)
    ones = tl.full(largest.shape, 0x01010101, tl.int32)
    zero = tl.zeros(largest.shape, tl.int32)
    every = _with(second, ones, ones, _with(first, ones, ones, (zero, zero)))
    if len(parts) == 2:
        return (first, second), every[0] * 256 + every[1], largest * (1 / LARGEST)
    else:
        third, fourth = _fixed(parts[2], factor, CODE), _fixed(parts[3], factor, CODE)
        every = _with(fourth, ones, ones, _with(third, ones, ones, every))
        return (first, second, third, fourth), every[0] * 256 + every[1], largest * (1 / LARGEST)


@triton.jit
def _with(piece, first, second, sums):  # type: ignore[no-untyped-def]
    """sums (high, low) + the products of a piece and eight bytes."""
    high = dot4(first, piece[0][0], sums[0])
    low = dot4(first, piece[0][1], sums[1])
    return dot4(second, piece[1][0], high), dot4(second, piece[1][1], low)


@triton.jit
def quarters(words):  # type: ignore[no-untyped-def]
    """Of words [rows, units * 4] the first to the fourth of each unit."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def add(sums, words, scales, zeros, x, table, FORM: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums [rows, units] + the products of words [rows, units * 4] and x (`fixed`), scaled."""
    parts, every, unit = x
    words = quarters(words)
    zero = tl.zeros(sums.shape, tl.int32)
    total = (zero, zero)
    for i in tl.static_range(len(parts)):
        piece = ((parts[i][0][0][None, :], parts[i][0][1][None, :]), (parts[i][1][0][None, :], parts[i][1][1][None, :]))
        if CODE == "int4":
            total = _with(piece, words[i] & 0x0F0F0F0F, (words[i] >> 4) & 0x0F0F0F0F, total)
        elif CODE == "e2m1":
            low, high = _e2m1(words[i], table)
            total = _with(piece, low, high, total)
        else:
            total = _with(piece, words[2 * i], words[2 * i + 1], total)
    whole = total[0] * 256 + total[1]
    if CODE == "int4":
        whole -= zeros.to(tl.int32) * every[None, :]
    factor = unit[None, :]
    if CODE == "e2m1":
        whole += (every * E2M1_BASE)[None, :]
        factor = factor * power(scales) * 0.5
    elif FORM != "rows":
        factor = factor * scales.to(tl.float32)
    return sums + whole.to(tl.float32) * factor

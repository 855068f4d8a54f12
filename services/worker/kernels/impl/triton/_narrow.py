"""How products find and widen weights of 8 and 4 bits. FORM says what they are; a row and a column add up to a place.

"rows": 8 bits, scale fp32 per row (ROW_SCALE), or one per expert. "blocks": 8 bits, scale fp32 per 128 rows and 128
columns. "mxfp4": e2m1, two to a byte, the lower half first; scales e8m0 per 32 columns, tiled (packing.mx). "mxfp8":
e4m3, scales e8m0 [N, K / 32]. "int4": as mxfp4 packed, 0 to 15; scales and zeros [N, K / GROUP]. TILED: see
packing.weight_tiles.
"""

import triton
import triton.language as tl


@triton.jit
def row_start(row, K: tl.constexpr, FORM: tl.constexpr, TILED: tl.constexpr, UNIT: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    """The place of a row's first element; UNIT of them are 16 bytes."""
    width: tl.constexpr = K * UNIT // (32 if FORM == "mxfp4" or FORM == "int4" else 16)
    if TILED:
        return row // 16 * (16 * width) + row % 16 * UNIT
    else:
        return row * width


@triton.jit
def column(col, UNIT: tl.constexpr, TILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of an element in its row."""
    if TILED:
        return col // UNIT * (16 * UNIT) + col % UNIT
    else:
        return col


@triton.jit
def scale_start(row, expert, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ROW_SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a row's first scale."""
    if FORM == "rows":
        return row if ROW_SCALE else row * 0 + expert
    elif FORM == "blocks":
        return row // 128 * (K // 128)
    elif FORM == "mxfp4":
        columns: tl.constexpr = (K // 32 + 7) // 8 * 8
        return row // 32 * (32 * columns) + row % 16 * 4 + row % 32 // 16
    else:
        return row * (K // GROUP)


@triton.jit
def code_tile(packed, zero, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of the lower and the upper halves of bytes, less `zero`, exact in any float.

    Behind a set exponent the four bits are a float: 128 + n in bf16, 1024 + n in fp16.
    """
    bits = packed.to(tl.int16)
    low = bits & 15
    high = (bits >> 4) & 15
    if dtype == tl.bfloat16:
        low = (low | 0x4300).to(tl.bfloat16, bitcast=True)
        high = (high | 0x4300).to(tl.bfloat16, bitcast=True)
        base = (zero + 128.0).to(tl.bfloat16) if not isinstance(zero, float) else zero + 128.0
    elif dtype == tl.float16:
        low = (low | 0x6400).to(tl.float16, bitcast=True)
        high = (high | 0x6400).to(tl.float16, bitcast=True)
        base = (zero + 1024.0).to(tl.float16) if not isinstance(zero, float) else zero + 1024.0
    else:
        low = low.to(dtype)
        high = high.to(dtype)
        base = zero
    return low - base, high - base


@triton.jit
def x_halves(x):  # type: ignore[no-untyped-def]
    """The even and the odd columns of x, [BLOCK_M, BLOCK_K / 2] each."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))

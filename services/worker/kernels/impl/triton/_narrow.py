"""How products find and widen weights of 8 and 4 bits. FORM says what they are; a row and a column add up to a place.

"rows": 8 bits, a scale per row (ROW_SCALE) or per expert. "blocks": 8 bits, a scale per 128 rows and 128 columns.
"int8", "int4": scales [N, K / GROUP], of int4 zeros too. "mxfp8", "mxfp4": e8m0 scales [N, K / 32]. Four bits lie two
to a byte, the lower half first. TILED: weights are tiles (packing.weight_tiles), those of mxfp4 with tiled scales
(packing.mx).
"""

import triton
import triton.language as tl

from services.worker.kernels.impl.triton._gate import activated, expert_gate
from services.worker.kernels.impl.triton._quantize import scale_columns


@triton.jit
def row_start(row, K: tl.constexpr, FORM: tl.constexpr, TILED: tl.constexpr, UNIT: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    """The place of a row's first element; UNIT of them are 16 bytes."""
    width: tl.constexpr = K * UNIT // (32 if FORM == "mxfp4" or FORM == "int4" else 16)
    if TILED:
        return row // 16 * (16 * width) + row % 16 * UNIT
    else:
        return row * width


@triton.jit
def column(col, TILED: tl.constexpr, UNIT: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    """The place of an element in its row."""
    if TILED:
        return col // UNIT * (16 * UNIT) + col % UNIT
    else:
        return col


@triton.jit
def scale_start(  # type: ignore[no-untyped-def]
    row, expert, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ROW_SCALE: tl.constexpr, TILED: tl.constexpr
):
    """The place of a row's first scale."""
    if FORM == "rows":
        return row if ROW_SCALE else row * 0 + expert
    elif FORM == "blocks":
        return row // 128 * (K // 128)
    elif FORM == "mxfp4" and TILED:
        columns: tl.constexpr = (K // 32 + 7) // 8 * 8
        return row // 32 * (32 * columns) + row % 16 * 4 + row % 32 // 16
    else:
        return row * (K // GROUP)


@triton.jit
def scale_column(col, FORM: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of column `col`'s scale among its row's."""
    if FORM == "mxfp4" and TILED:
        return scale_columns(col // GROUP)
    else:
        return col // GROUP


@triton.jit
def power(scale):  # type: ignore[no-untyped-def]
    """fp32 of e8m0; that of 0 is subnormal."""
    bits = scale.to(tl.int32) << 23
    return tl.where(scale == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gate of an MLP, fp32: "silu", "gelu_tanh", or "clamped" as in the op moe_clamped."""
    if ACTIVATION == "clamped":
        return expert_gate(gate, up, True)
    else:
        return activated(gate, ACTIVATION) * up

"""x @ W.T for few rows of x, W in tiles of four or eight bits; each weight is read once for up to eight rows.

The inner loops are written as LLVM vector code, 16 lanes wide: a compiler's loop vectorizer does not find them.
Activations stay fp32 and so do sums, so only the stored numbers' own rounding is left.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from services.worker.kernels.impl.numba._team import kernel, launch, unavailable
from services.worker.kernels.ops.grouped_linear import TILE, grouped_linear, tile_bytes
from services.worker.kernels.registry import Facts, Impl

TOGETHER = 8  # rows of x that share one pass over a tile
_LANES = 16
_CHAINS = (0, 4, 2, 2, 1, 1, 1, 1, 1)  # sums per row of x that run at once, by rows: a multiply-add takes four cycles
_AHEAD = 2048  # bytes: hardware prefetching stops at the end of a memory page, and weights come from memory each step
_I64, _I8 = ir.IntType(64), ir.IntType(8)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, _LANES)
_WIDE = ir.VectorType(ir.IntType(32), _LANES)


def _load(builder: Any, address: Any, element: Any) -> Any:
    """16 elements from any address."""
    vector = ir.VectorType(element, _LANES)
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=2)


def _at(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(_I64, size)))


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _column(builder: Any, address: Any, bits: int) -> list[Any]:
    """The two vectors of one column of a tile, as floats."""
    if bits == 8:
        halves = [_load(builder, _at(builder, address, ir.Constant(_I64, i), _LANES), _I8) for i in range(2)]
        return [builder.sitofp(builder.sext(half, _WIDE), _VECTOR) for half in halves]
    packed = builder.zext(_load(builder, address, _I8), _WIDE)
    low = builder.and_(packed, ir.Constant(_WIDE, [15] * _LANES))
    high = builder.lshr(packed, ir.Constant(_WIDE, [4] * _LANES))
    return [builder.sitofp(part, _VECTOR) for part in (low, high)]


def _group_sum(builder: Any, address: Any) -> Any:
    """Sum of 32 floats."""
    total = builder.fadd(*(_load(builder, _at(builder, address, ir.Constant(_I64, i), 64), _F32) for i in range(2)))
    width = _LANES
    while width > 1:
        width //= 2
        turned = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [(i + width) % _LANES for i in range(_LANES)])
        total = builder.fadd(total, builder.shuffle_vector(total, total, turned))
    return total


def _prefetch(builder: Any, address: Any, size: int) -> None:
    byte_pointer, flag = _I8.as_pointer(), ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    for line in range(0, size, 64):
        place = builder.inttoptr(builder.add(address, ir.Constant(_I64, line)), byte_pointer)
        builder.call(prefetch, [place, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])


def _make_tiles(rows: int, bits: int) -> Any:
    """An intrinsic: `rows` rows of x times one row of tiles."""
    size = tile_bytes(bits)
    numbers_at = size - TILE * TILE * bits // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tiles, x, x_stride, y, y_stride, groups = arguments
        fma_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, "llvm.fma.v16f32")
        zero = ir.Constant(_VECTOR, [0.0] * _LANES)
        places = [(row, half) for row in range(rows) for half in range(2)]
        chains = [(place, chain) for place in places for chain in range(_CHAINS[rows])]
        totals = {place: cgutils.alloca_once_value(builder, zero) for place in places}
        sums = {chain: cgutils.alloca_once_value(builder, zero) for chain in chains}
        x_rows = [_at(builder, x, builder.mul(x_stride, ir.Constant(_I64, row)), 4) for row in range(rows)]
        with cgutils.for_range(builder, groups) as group:
            tile = _at(builder, tiles, group.index, size)
            _prefetch(builder, builder.add(tile, ir.Constant(_I64, _AHEAD)), size)
            x_group = [_at(builder, row, group.index, TILE * 4) for row in x_rows]
            for slot in sums.values():
                builder.store(zero, slot)
            start = builder.add(tile, ir.Constant(_I64, numbers_at))
            with cgutils.for_range(builder, ir.Constant(_I64, TILE // _CHAINS[rows])) as step:
                first = builder.mul(step.index, ir.Constant(_I64, _CHAINS[rows]))
                for chain in range(_CHAINS[rows]):
                    column = builder.add(first, ir.Constant(_I64, chain))
                    weights = _column(builder, _at(builder, start, column, TILE * bits // 8), bits)
                    for row in range(rows):
                        address = builder.inttoptr(_at(builder, x_group[row], column, 4), _F32.as_pointer())
                        factor = _splat(builder, builder.load(address))
                        for half in range(2):
                            slot = sums[(row, half), chain]
                            builder.store(builder.call(fma, [weights[half], factor, builder.load(slot)]), slot)
            offset_sums = [_group_sum(builder, row) for row in x_group] if bits == 4 else []
            for row, half in places:
                scale_at = _at(builder, tile, ir.Constant(_I64, half), 2 * _LANES)
                scale = builder.fpext(_load(builder, scale_at, ir.HalfType()), _VECTOR)
                group_sum = builder.load(sums[(row, half), 0])
                for chain in range(1, _CHAINS[rows]):
                    group_sum = builder.fadd(group_sum, builder.load(sums[(row, half), chain]))
                total = builder.call(fma, [scale, group_sum, builder.load(totals[row, half])])
                if bits == 4:
                    offset_at = builder.add(scale_at, ir.Constant(_I64, 2 * TILE))
                    offset = builder.fpext(_load(builder, offset_at, ir.HalfType()), _VECTOR)
                    total = builder.call(fma, [offset, offset_sums[row], total])
                builder.store(total, totals[row, half])
        for row, half in places:
            start = _at(builder, y, builder.mul(y_stride, ir.Constant(_I64, row)), 4)
            address = builder.add(start, ir.Constant(_I64, half * _LANES * 4))
            builder.store(builder.load(totals[row, half]), builder.inttoptr(address, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    @intrinsic
    def multiply(typing_context: Any, tiles: Any, x: Any, x_stride: Any, y: Any, y_stride: Any, groups: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return multiply


_TILE4, _TILE8 = tile_bytes(4), tile_bytes(8)
_int4_1, _int4_2, _int4_3, _int4_4, _int4_5, _int4_6, _int4_7, _int4_8 = (_make_tiles(i, 4) for i in range(1, 9))
_int8_1, _int8_2, _int8_3, _int8_4, _int8_5, _int8_6, _int8_7, _int8_8 = (_make_tiles(i, 8) for i in range(1, 9))


def _int4(numbers: Any, thread: int, threads: int) -> None:
    tiles, x, y, rows, groups, blocks = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    inner, outer = groups * TILE, blocks * TILE
    for block in range(thread * blocks // threads, (thread + 1) * blocks // threads):
        start = tiles + block * groups * _TILE4
        for row in range(0, rows, TOGETHER):
            source, target, left = x + row * inner * 4, y + (row * outer + block * TILE) * 4, rows - row
            if left == 1:
                _int4_1(start, source, inner, target, outer, groups)
            elif left == 2:
                _int4_2(start, source, inner, target, outer, groups)
            elif left == 3:
                _int4_3(start, source, inner, target, outer, groups)
            elif left == 4:
                _int4_4(start, source, inner, target, outer, groups)
            elif left == 5:
                _int4_5(start, source, inner, target, outer, groups)
            elif left == 6:
                _int4_6(start, source, inner, target, outer, groups)
            elif left == 7:
                _int4_7(start, source, inner, target, outer, groups)
            else:
                _int4_8(start, source, inner, target, outer, groups)


def _int8(numbers: Any, thread: int, threads: int) -> None:
    tiles, x, y, rows, groups, blocks = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    inner, outer = groups * TILE, blocks * TILE
    for block in range(thread * blocks // threads, (thread + 1) * blocks // threads):
        start = tiles + block * groups * _TILE8
        for row in range(0, rows, TOGETHER):
            source, target, left = x + row * inner * 4, y + (row * outer + block * TILE) * 4, rows - row
            if left == 1:
                _int8_1(start, source, inner, target, outer, groups)
            elif left == 2:
                _int8_2(start, source, inner, target, outer, groups)
            elif left == 3:
                _int8_3(start, source, inner, target, outer, groups)
            elif left == 4:
                _int8_4(start, source, inner, target, outer, groups)
            elif left == 5:
                _int8_5(start, source, inner, target, outer, groups)
            elif left == 6:
                _int8_6(start, source, inner, target, outer, groups)
            elif left == 7:
                _int8_7(start, source, inner, target, outer, groups)
            else:
                _int8_8(start, source, inner, target, outer, groups)


_ADDRESSES: dict[int, int] = {4: kernel(_int4), 8: kernel(_int8)}


def grouped_linear_vectors(x: Tensor, tiles: Tensor, bits: int, out_features: int) -> Tensor:
    blocks, groups = tiles.shape[:2]
    num_rows = x.shape[0]
    y = torch.empty(num_rows, blocks * TILE)
    if num_rows:
        addresses = tiles.data_ptr(), x.data_ptr(), y.data_ptr()
        launch(_ADDRESSES[bits], torch.get_num_threads(), *addresses, num_rows, groups, blocks)
    return y if blocks * TILE == out_features else y[:, :out_features].contiguous()


def refuses(facts: Facts) -> str | None:
    return "for CPUs" if facts.device != "cpu" else unavailable()


IMPL = Impl(grouped_linear, "numba", grouped_linear_vectors, refuses)

"""Matrix product with weights of four or eight bits that have a scale (and an offset) per group of 32 columns.

Weights lie in tiles of 32 rows by 32 columns: 32 fp16 scales, for four bits 32 fp16 offsets, then column by column the
32 numbers (four bits: rows 0 to 15 in the low halves). So a vector's lanes are rows of W, and no sum crosses lanes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.registry import Case, Tolerance, op

TILE = 32  # rows and columns of a tile


def tile_bytes(bits: int) -> int:
    return TILE * 2 * (2 if bits == 4 else 1) + TILE * TILE * bits // 8


def pack_tiles(numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """The tiles of a matrix, uint8 [ceil(rows / 32), in / 32, bytes of a tile]; rows that are not there are zero.

    With offsets the numbers are of four bits, uint8 [rows, in]; without, int8 [rows, in]. scales, offsets: fp32
    [rows, in / 32], rounded to fp16. weight = number * scale + offset.
    """
    rows, inner = numbers.shape
    blocks, groups = -(-rows // TILE), inner // TILE

    def padded(values: Tensor) -> Tensor:
        missing = blocks * TILE - rows
        return functional.pad(values, (0, 0, 0, missing)) if missing else values

    def halves(values: Tensor) -> Tensor:
        half = padded(values).view(blocks, TILE, groups).transpose(1, 2).to(torch.float16)
        return half.contiguous().view(torch.uint8)

    columns = padded(numbers.view(torch.uint8)).view(blocks, TILE, groups, TILE).permute(0, 2, 3, 1)
    if offsets is None:
        return torch.cat((halves(scales), columns.reshape(blocks, groups, -1)), dim=-1)
    pairs = columns[..., : TILE // 2] | columns[..., TILE // 2 :] << 4
    return torch.cat((halves(scales), halves(offsets), pairs.reshape(blocks, groups, -1)), dim=-1)


def unpack_tiles(tiles: Tensor, bits: int) -> Tensor:
    """The matrix, fp32 [32 * blocks, in]."""
    blocks, groups = tiles.shape[:2]
    head = 2 * TILE if bits == 8 else 4 * TILE
    numbers = tiles[..., head:].reshape(blocks, groups, TILE, -1)
    if bits == 4:
        numbers = torch.cat((numbers & 15, numbers >> 4), dim=-1)
    else:
        numbers = numbers.view(torch.int8)
    values = tiles[..., :head].contiguous().view(torch.float16).float().view(blocks, groups, -1, 1, TILE)
    weight = numbers.float() * values[:, :, 0]
    if bits == 4:
        weight = weight + values[:, :, 1]
    return weight.permute(0, 3, 1, 2).reshape(blocks * TILE, groups * TILE)


def make_grouped_case(num_tokens: int, in_features: int, out_features: int, bits: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, int, int]:
        generator = torch.Generator().manual_seed(num_tokens + out_features)
        numbers = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator, dtype=torch.uint8)
        scales = torch.rand(out_features, in_features // TILE, generator=generator) / in_features**0.5 / (1 << bits)
        offsets = -7.5 * scales if bits == 4 else None
        x = torch.randn(num_tokens, in_features, generator=generator)
        return x.to(dtype), pack_tiles(numbers, scales, offsets), bits, out_features

    return Case(f"{num_tokens}x{in_features}x{out_features}i{bits}", make)


@op(
    cases=[
        *(make_grouped_case(rows, 96, 64, bits) for rows in range(1, 10) for bits in (4, 8)),
        make_grouped_case(1, 576, 960, 4),
        make_grouped_case(17, 1536, 40, 4),
        make_grouped_case(3, 32, 1, 8),
        make_grouped_case(0, 64, 32, 4),
    ],
    tolerances={torch.float32: Tolerance(1e-5, 1e-5, "order of sums over in_features")},
)
def grouped_linear(x: Tensor, tiles: Tensor, bits: int, out_features: int) -> Tensor:
    """x @ W.T in fp32. x: [T, in], contiguous; tiles: as `pack_tiles` makes them; returns a new [T, out_features]."""
    return functional.linear(x, unpack_tiles(tiles, bits)[:out_features].to(x.dtype))

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.grouped_linear import grouped_linear, pack_tiles, tile_bytes, unpack_tiles


def formula(x: Tensor, tiles: Tensor, bits: int, out_features: int) -> Tensor:
    """Column by column of a tile, from its bytes."""
    out = x.new_zeros(len(x), tiles.shape[0] * 32)
    for block, groups in enumerate(tiles):
        for group, tile in enumerate(groups):
            scales = tile[:64].clone().view(torch.float16).double()
            offsets = tile[64:128].clone().view(torch.float16).double() if bits == 4 else torch.zeros(32).double()
            numbers = tile[128 if bits == 4 else 64 :].view(32, -1)
            for column in range(32):
                own = numbers[column]
                own = torch.cat((own & 15, own >> 4)) if bits == 4 else own.view(torch.int8)
                weights = own.double() * scales + offsets
                out[:, block * 32 : block * 32 + 32] += x[:, group * 32 + column, None] * weights
    return out[:, :out_features]


def test_equals_formula(check: Any) -> None:
    check(grouped_linear, formula)


def test_tiles_keep_the_matrix() -> None:
    scales, offsets = torch.rand(40, 2).half().float(), torch.rand(40, 2).half().float()
    few = torch.randint(0, 16, (40, 64), dtype=torch.uint8)
    tiles = pack_tiles(few, scales, offsets)
    assert tiles.shape == (2, 2, tile_bytes(4))
    wide = few.float() * scales.repeat_interleave(32, 1) + offsets.repeat_interleave(32, 1)
    assert torch.equal(unpack_tiles(tiles, 4)[:40], wide) and not unpack_tiles(tiles, 4)[40:].any()
    many = torch.randint(-128, 128, (40, 64), dtype=torch.int8)
    tiles = pack_tiles(many, scales, None)
    assert tiles.shape == (2, 2, tile_bytes(8))
    assert torch.equal(unpack_tiles(tiles, 8)[:40], many.float() * scales.repeat_interleave(32, 1))

import torch

from services.worker.kernels.impl.aiter._mxfp4 import as_scales, as_tiles
from services.worker.kernels.packing.mx import tile_scales


def test_scales_are_renamed_and_not_moved() -> None:
    tiles = tile_scales(torch.arange(300 * 9).view(300, 9).to(torch.uint8))
    named = as_scales(tiles)
    assert named.shape == (512, 16) and named.dtype == torch.float8_e8m0fnu
    assert named.data_ptr() == tiles.data_ptr() and torch.equal(as_tiles(named), tiles)

import torch

from services.worker.kernels.impl.aiter._moe import shuffled
from services.worker.kernels.packing.weight_tiles import tile_weight


def test_tiles_are_marked_without_a_copy() -> None:
    tiles = tile_weight(torch.arange(2 * 32 * 64).view(2, 32, 64).to(torch.uint8))
    weight = shuffled(tiles)
    assert weight.is_shuffled and weight.shape == (2, 32, 64)  # type: ignore[attr-defined]
    assert weight.data_ptr() == tiles.data_ptr() and not hasattr(tiles, "is_shuffled")
    packed = shuffled(tiles, torch.float4_e2m1fn_x2)
    assert packed.is_shuffled and packed.dtype == torch.float4_e2m1fn_x2  # type: ignore[attr-defined]

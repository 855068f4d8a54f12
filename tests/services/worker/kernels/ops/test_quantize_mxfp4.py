import torch

from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.packing.mx import decode_mxfp4, decode_scales, untile_scales


def test_every_number_is_within_half_a_step() -> None:
    """Steps are 1/2 up to 2, 1 up to 4, 2 up to 6, each times the group's scale."""
    for dtype in quantize_mxfp4.tolerances:
        for case in quantize_mxfp4.cases:
            (x,) = case.make(dtype)
            packed, tiles = quantize_mxfp4.meaning(x)
            assert packed.dtype == tiles.dtype == torch.uint8 and packed.shape == (len(x), x.shape[1] // 2)
            scales = untile_scales(tiles, len(x), x.shape[1] // 32)
            wide = decode_scales(scales).repeat_interleave(32, -1)
            size = x.float().abs() / wide
            half = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
            assert ((decode_mxfp4(packed, scales) - x.float()).abs() <= half * wide).all() and (size <= 6).all()

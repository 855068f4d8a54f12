import torch

from services.worker.kernels.ops.quantize_mxfp8 import quantize_mxfp8
from services.worker.kernels.packing.mx import decode_mxfp8, decode_scales


def test_every_number_is_within_half_a_step() -> None:
    """Numbers have three bits behind the first; below 2 ** -6 steps are 2 ** -9, times the group's scale."""
    for dtype in quantize_mxfp8.tolerances:
        for case in quantize_mxfp8.cases:
            x, stored = case.make(dtype)
            numbers, scales = quantize_mxfp8.meaning(x, stored)
            assert numbers.dtype == stored and scales.shape == (len(x), x.shape[1] // 32)
            wide = decode_scales(scales).repeat_interleave(32, -1)
            size = x.float().abs() / wide
            half = torch.maximum(size, torch.tensor(2.0**-6)) / 16
            assert ((decode_mxfp8(numbers, scales) - x.float()).abs() <= half * wide).all()
            assert (size <= torch.finfo(stored).max).all()

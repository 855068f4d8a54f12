import torch

from services.worker.kernels.ops.norm_quantize_rows import norm_quantize_rows


def test_is_the_norm_in_eight_bits() -> None:
    for dtype in norm_quantize_rows.tolerances:
        for case in norm_quantize_rows.cases:
            x, norm, eps, stored = case.make(dtype)
            numbers, scales = norm_quantize_rows.meaning(x, norm, eps, stored)
            assert numbers.dtype == stored and scales.shape == (len(x), 1)
            wide = x.double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
            back = numbers.double() * scales.double()
            torch.testing.assert_close(back, normed, rtol=0.08, atol=float(torch.finfo(dtype).eps) * 512 + 0.5)

import torch

from services.worker.kernels.ops.quantize_rows import limit_of
from services.worker.kernels.ops.quantize_tensor import quantize_tensor


def test_one_scale_for_all() -> None:
    for dtype in quantize_tensor.tolerances:
        for case in quantize_tensor.cases:
            x, stored = case.make(dtype)
            numbers, scale = quantize_tensor.meaning(x, stored)
            assert numbers.dtype == stored and scale.shape == (1,) and scale.dtype == torch.float32
            torch.testing.assert_close(scale * limit_of(stored), x.float().abs().amax().view(1))
            step = scale / 2 if stored == torch.int8 else x.float().abs() / 16 + scale * 2.0**-10
            assert ((numbers.float() * scale - x.float()).abs() <= step * 1.001).all()

import torch

from services.worker.kernels.ops.add_norm_quantize_rows import add_norm_quantize_rows
from services.worker.kernels.ops.norm_quantize_rows import norm_quantize_rows


def test_is_the_norm_of_the_sum() -> None:
    for dtype in add_norm_quantize_rows.tolerances:
        for case in add_norm_quantize_rows.cases:
            x, residual, norm, eps, stored = case.make(dtype)
            before = x.clone(), residual.clone()
            numbers, scales, total = add_norm_quantize_rows.meaning(x, residual, norm, eps, stored)
            assert torch.equal(total, x + residual) and torch.equal(x, before[0]) and torch.equal(residual, before[1])
            wanted, wanted_scales = norm_quantize_rows.meaning(total, norm, eps, stored)
            assert torch.equal(numbers.float(), wanted.float()) and torch.equal(scales, wanted_scales)

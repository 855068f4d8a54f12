import torch

from services.worker.kernels.ops.add_norm_quantize_groups import add_norm_quantize_groups
from services.worker.kernels.ops.norm_quantize_groups import norm_quantize_groups


def test_is_the_norm_of_the_sum() -> None:
    for dtype in add_norm_quantize_groups.tolerances:
        for case in add_norm_quantize_groups.cases:
            x, residual, *others = case.make(dtype)
            before = x.clone(), residual.clone()
            numbers, scales, total = add_norm_quantize_groups.meaning(x, residual, *others)
            assert torch.equal(total, x + residual) and torch.equal(x, before[0]) and torch.equal(residual, before[1])
            wanted, wanted_scales = norm_quantize_groups.meaning(total, *others)
            assert torch.equal(numbers.float(), wanted.float()) and torch.equal(scales, wanted_scales)

import torch

from services.worker.kernels.ops.norm_quantize_groups import norm_quantize_groups
from services.worker.kernels.ops.quantize_groups import quantize_groups
from services.worker.kernels.ops.rms_norm import rms_norm


def test_is_the_norm_by_group() -> None:
    for dtype in norm_quantize_groups.tolerances:
        for case in norm_quantize_groups.cases:
            x, norm, eps, stored, group, by_column = case.make(dtype)
            numbers, scales = norm_quantize_groups.meaning(x, norm, eps, stored, group, by_column)
            wanted = quantize_groups.meaning(rms_norm.meaning(x, norm, eps), stored, group, by_column)
            assert torch.equal(numbers.float(), wanted[0].float()) and torch.equal(scales, wanted[1])
            by_token = scales.T if by_column else scales
            wide = x.double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
            back = numbers.double() * by_token.double().repeat_interleave(group, -1)
            torch.testing.assert_close(back, normed, rtol=0.08, atol=float(torch.finfo(dtype).eps) * 512 + 0.5)

import torch

from services.worker.kernels.ops.norm_quantize_mxfp4 import norm_quantize_mxfp4
from services.worker.kernels.packing.mx import decode_mxfp4, untile_scales


def test_is_the_norm_and_its_cases_lose_nothing() -> None:
    for dtype in norm_quantize_mxfp4.tolerances:
        for case in norm_quantize_mxfp4.cases:
            x, norm, eps = case.make(dtype)
            packed, scales = norm_quantize_mxfp4.meaning(x, norm, eps)
            back = decode_mxfp4(packed, untile_scales(scales, len(x), x.shape[1] // 32))
            assert torch.equal(back, x.float() * norm.float())


def test_another_order_of_sums_changes_no_code() -> None:
    """In fp32 and in 16 bits alike, and for a norm that is a little larger or smaller."""
    for case in norm_quantize_mxfp4.cases:
        x, norm, eps = case.make(torch.float32)
        wanted = norm_quantize_mxfp4.meaning(x, norm, eps)
        for factor in (1.0, 0.999, 1.001):
            for got, right in zip(norm_quantize_mxfp4.meaning(x, norm * factor, eps), wanted, strict=True):
                assert torch.equal(got, right)

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.mxfp8_linear import mxfp8_linear
from tests.services.worker.kernels.ops.narrow_weights import mxfp8_by_number


def formula(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: Any
) -> Tensor:
    y = mxfp8_by_number(x, scales) @ mxfp8_by_number(weight, weight_scales).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(mxfp8_linear, formula)


def test_is_near_the_product_of_what_was_quantized() -> None:
    x, scales, weight, weight_scales, bias, dtype = mxfp8_linear.cases[0].make(torch.float32)
    y = mxfp8_linear.meaning(x, scales, weight, weight_scales, bias, dtype)
    assert y.dtype == torch.float32 and 0.8 < float(y.std()) < 1.2

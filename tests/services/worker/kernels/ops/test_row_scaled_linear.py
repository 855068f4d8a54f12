from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.row_scaled_linear import row_scaled_linear
from services.worker.kernels.packing.weight_tiles import untile_weight


def formula(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: Any
) -> Tensor:
    """The dequantized product in float64."""
    rows = weight if weight.dim() == 2 else untile_weight(weight)
    y = (x.double() * scales) @ (rows.double() * weight_scales).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(row_scaled_linear, formula)


def test_is_near_the_product_of_what_was_quantized() -> None:
    """Two roundings to fp8 leave a sum of products within a twentieth of its size."""
    x, scales, weight, weight_scales, _, _ = row_scaled_linear.cases[0].make(torch.float32)
    y = row_scaled_linear.meaning(x, scales, weight, weight_scales, None, torch.bfloat16)
    assert y.dtype == torch.bfloat16 and 0.8 < float(y.float().std()) < 1.2

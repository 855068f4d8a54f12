from typing import Any

from torch import Tensor

from services.worker.kernels.ops.tensor_scaled_linear import tensor_scaled_linear


def formula(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:
    """The dequantized product in float64."""
    y = (x.double() * scale) @ (weight.double() * weight_scale).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(tensor_scaled_linear, formula)

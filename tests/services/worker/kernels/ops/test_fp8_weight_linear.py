from typing import Any

from torch import Tensor

from services.worker.kernels.ops.fp8_weight_linear import fp8_weight_linear


def formula(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.to(x.dtype).T * scales.to(x.dtype).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(fp8_weight_linear, formula)

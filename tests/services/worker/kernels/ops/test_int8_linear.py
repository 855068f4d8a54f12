from typing import Any

from torch import Tensor

from services.worker.kernels.ops.int8_linear import int8_linear
from tests.services.worker.kernels.ops.narrow_weights import int8_by_number


def formula(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ int8_by_number(weight, scales).T
    return y if bias is None else y + bias


def test_equals_formula(check: Any) -> None:
    check(int8_linear, formula)

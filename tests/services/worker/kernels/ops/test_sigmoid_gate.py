from typing import Any

from torch import Tensor

from services.worker.kernels.ops.sigmoid_gate import sigmoid_gate


def formula(x: Tensor, gate: Tensor) -> Tensor:
    return x / (1 + (-gate).exp())


def test_equals_formula(check: Any) -> None:
    check(sigmoid_gate, formula)

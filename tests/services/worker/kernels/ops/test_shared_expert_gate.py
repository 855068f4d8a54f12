from typing import Any

from torch import Tensor

from services.worker.kernels.ops.shared_expert_gate import shared_expert_gate


def formula(halves: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    width = halves.shape[1] // 2
    gate, up = halves[:, :width], halves[:, width:]
    counts = (x * weight).sum(1, keepdim=True)
    return gate / (1 + (-gate).exp()) * up / (1 + (-counts).exp())


def test_equals_formula(check: Any) -> None:
    check(shared_expert_gate, formula)

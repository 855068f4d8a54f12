from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.add_rms_norm import add_rms_norm


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total / ((total * total).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight, total

    check(add_rms_norm, formula)


def test_leaves_its_inputs_alone() -> None:
    x, residual, weight, eps = add_rms_norm.cases[0].make(torch.float32)
    before = x.clone(), residual.clone()
    add_rms_norm.meaning(x, residual, weight, eps)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])

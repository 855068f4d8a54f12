from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.linear import linear


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = (x[:, None, :] * weight[None]).sum(-1)
        return product if bias is None else product + bias

    check(linear, formula)


def test_empty_batch_keeps_its_width() -> None:
    assert linear.meaning(torch.empty(0, 4), torch.ones(3, 4), None).shape == (0, 3)

from typing import Any

import torch

from services.worker.layers.linear import Linear


def test_applies_weight_and_bias(plain_weight: Any) -> None:
    x = torch.tensor([[1.0, 2.0]])
    weight = plain_weight(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    assert Linear(weight)(x).tolist() == [[3.0, 6.0]]
    assert Linear(weight, torch.tensor([1.0, -1.0]))(x).tolist() == [[4.0, 5.0]]

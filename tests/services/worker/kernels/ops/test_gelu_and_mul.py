import math
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up

    check(gelu_and_mul, formula)

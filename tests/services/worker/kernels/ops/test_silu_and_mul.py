from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.silu_and_mul import silu_and_mul


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return gate / (1 + torch.exp(-gate)) * up

    check(silu_and_mul, formula)

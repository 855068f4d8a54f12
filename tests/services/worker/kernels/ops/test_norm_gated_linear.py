import math
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        fused = x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * norm @ weight.T
        gate, up = fused.chunk(2, -1)
        if activation == "silu":
            return gate / (1 + torch.exp(-gate)) * up
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up

    check(norm_gated_linear, formula)

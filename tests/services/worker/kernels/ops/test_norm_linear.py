from typing import Any

from torch import Tensor

from services.worker.kernels.ops.norm_linear import norm_linear


def test_equals_formula(check: Any) -> None:
    def formula(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        normed = x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * norm
        product = normed @ weight.T
        return product if bias is None else product + bias

    check(norm_linear, formula)

from typing import Any

from torch import Tensor

from services.worker.kernels.ops.rms_norm import rms_norm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def test_equals_formula(check: Any) -> None:
    check(rms_norm, formula)

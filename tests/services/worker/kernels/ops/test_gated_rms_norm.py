from typing import Any

from torch import Tensor

from services.worker.kernels.ops.gated_rms_norm import gated_rms_norm


def formula(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    gates = gate.reshape(x.shape)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * gates / (1 + (-gates).exp())


def test_equals_formula(check: Any) -> None:
    check(gated_rms_norm, formula)

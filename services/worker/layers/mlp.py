"""Gated MLP: down(silu(gate(x)) * up(x)), gate and up in one projection."""

from torch import Tensor

from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, bindings: Bindings) -> None:
        self.gate_up, self.down = gate_up, down
        self._silu_and_mul = bindings(silu_and_mul)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, N]; returns [T, N]."""
        return self.down(self._silu_and_mul(self.gate_up(x)))

"""Gated MLP on the residual stream: x += down(silu(gate(norm(x))) * up(norm(x))), gate and up in one projection."""

from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.quant.contract import Norm


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        self.down.add_to(x, self.gate_up.gated(x, norm, self.activation))

"""Gated MLP on the residual stream: x += down(silu(gate(norm(x))) * up(norm(x))), gate and up in one projection."""

from torch import Tensor

from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear
from services.worker.quant.contract import Norm


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        if self.down.takes_gate and self.activation == "silu":
            self.down.add_after_gate(x, self.gate_up.after_norm(x, norm))
        else:
            self.down.add_to(x, self.gate_up.gated(x, norm, self.activation))

    def add_to(self, residual: Tensor, normed: Tensor) -> None:
        """residual += the MLP of rows that are normed already. Both [T, N]."""
        if self.down.takes_gate and self.activation == "silu":
            self.down.add_after_gate(residual, self.gate_up(normed))
            return
        self.down.add_to(residual, self.gate_up.gated(normed, None, self.activation))


class NormedMlp:
    """A gated MLP whose result is normed before it is added."""

    def __init__(self, mlp: GatedMlp, after: Norm, bindings: Bindings) -> None:
        self.mlp, self.after = mlp, after
        self._rms_norm = bindings(rms_norm)

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        y = self.mlp.down(self.mlp.gate_up.gated(x, norm, self.mlp.activation))
        x.add_(self._rms_norm(y, self.after.weight, self.after.eps))

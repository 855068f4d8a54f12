"""Gated MLP on the residual stream: x += down(silu(gate(norm(x))) * up(norm(x))), gate and up in one projection."""

from torch import Tensor

from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Bindings
from services.worker.layers.linear import Linear
from services.worker.quant.contract import Norm


class GatedMlp:
    """`joins_norm`: whether the next norm may come with the result, by `add_and_norm`."""

    takes_normed = True

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.joins_norm = down.joins_norm
        self._gates_down = down.takes_gate and activation == "silu"

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        self.add_to(x, x, norm)

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        """residual += the MLP of norm(x); without a norm x is normed already. Both [T, N]."""
        if self._gates_down:
            self.down.add_after_gate(residual, self._inner(x, norm))
        else:
            self.down.add_to(residual, self._inner(x, norm))

    def add_and_norm(self, residual: Tensor, x: Tensor, norm: Norm | None, following: Norm) -> Tensor:
        """`add_to`; returns what `following` makes of residual then, [T, N], new."""
        return self.down.add_and_norm(residual, self._inner(x, norm), following, self._gates_down)

    def _inner(self, x: Tensor, norm: Norm | None) -> Tensor:
        """What `down` takes: gated, or if it does that itself both halves."""
        if not self._gates_down:
            return self.gate_up.gated(x, norm, self.activation)
        return self.gate_up(x) if norm is None else self.gate_up.after_norm(x, norm)


class NormedMlp:
    """A gated MLP whose result is normed before it is added."""

    joins_norm = False

    def __init__(self, mlp: GatedMlp, after: Norm, bindings: Bindings) -> None:
        self.mlp, self.after = mlp, after
        self._rms_norm = bindings(rms_norm)

    def __call__(self, x: Tensor, norm: Norm) -> None:
        """x: [T, N], the residual stream, changed in place."""
        y = self.mlp.down(self.mlp.gate_up.gated(x, norm, self.mlp.activation))
        x.add_(self._rms_norm(y, self.after.weight, self.after.eps))

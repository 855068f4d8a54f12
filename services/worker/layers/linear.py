"""A linear layer: a weight of any format, a bias, and the product's surroundings, fused where the weight can."""

from torch import Tensor

from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Bindings
from services.worker.quant.contract import JoinsNorm, Norm, TakesGate, Weight


class Linear:
    def __init__(self, weight: Weight, bias: Tensor | None, bindings: Bindings) -> None:
        self.weight = weight
        self.bias = bias
        self.takes_gate = isinstance(weight, TakesGate) and weight.takes_gate
        self.joins_norm = isinstance(weight, JoinsNorm) and weight.joins_norm
        self._rms_norm = bindings(rms_norm)
        self._gates = {"silu": bindings(silu_and_mul), "gelu_tanh": bindings(gelu_and_mul)}

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in], contiguous; returns [T, out]."""
        return self.weight.linear(x, self.bias)

    def after_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x: [T, in], the residual stream; returns the projection of its norm, [T, out]."""
        if (fused := self.weight.fused) is not None:
            return fused.after_norm(x, norm, self.bias)
        return self(self._rms_norm(x, norm.weight, norm.eps))

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """x: [T, in], the residual stream; returns what `after_norm` projects, a new tensor."""
        return self._rms_norm(x, norm.weight, norm.eps)

    def gated(self, x: Tensor, norm: Norm | None, activation: str) -> Tensor:
        """activation(gate) * up of `after_norm`, whose first half is the gate. Returns [T, out / 2].

        Without a norm x is normed already.
        """
        if norm is None:
            return self._gates[activation](self(x))
        if (fused := self.weight.fused) is not None:
            return fused.gated(x, norm, self.bias, activation)
        return self._gates[activation](self.after_norm(x, norm))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += self(x), in place. residual: [T, out], contiguous; x: [T, in]."""
        if (fused := self.weight.fused) is not None:
            fused.add_to(residual, x, self.bias)
        else:
            residual.add_(self(x))

    def add_after_gate(self, residual: Tensor, halves: Tensor) -> None:
        """residual += self(silu(gate) * up), in place, if `takes_gate`. halves: [T, 2 * in], gate first."""
        assert isinstance(self.weight, TakesGate)
        residual.add_(self.weight.after_gate(halves, self.bias))

    def add_and_norm(self, residual: Tensor, x: Tensor, norm: Norm, gated: bool = False) -> Tensor:
        """`add_to`, or if `gated` `add_after_gate`, if `joins_norm`; returns the norm of residual, [T, out], new."""
        assert isinstance(self.weight, JoinsNorm)
        return self.weight.add_and_norm(residual, x, self.bias, gated, norm)

"""A linear layer: a weight of any format, and a bias."""

from torch import Tensor

from services.worker.quant.contract import Weight


class Linear:
    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in], contiguous; returns [T, out]."""
        return self.weight.linear(x, self.bias)

from typing import Any

import pytest
import torch
from torch.nn import functional

from services.worker.kernels.registry import Facts, bind
from services.worker.layers.linear import Linear
from services.worker.quant.contract import Norm
from services.worker.quant.none import DenseProducts, DenseWeight

TORCH = bind(("torch",), Facts("cpu"))


def test_applies_weight_and_bias(plain_weight: Any) -> None:
    x = torch.tensor([[1.0, 2.0]])
    weight = plain_weight(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    assert Linear(weight, None, TORCH)(x).tolist() == [[3.0, 6.0]]
    assert Linear(weight, torch.tensor([1.0, -1.0]), TORCH)(x).tolist() == [[4.0, 5.0]]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_surroundings_are_the_same_fused_or_not(plain_weight: Any, fused: bool, activation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values, x = torch.randn(6, 4, generator=generator), torch.randn(3, 4, generator=generator)
    norm, bias = Norm(torch.rand(4, generator=generator), 1e-5), torch.randn(6, generator=generator)
    weight = DenseWeight(values, products=DenseProducts(values, TORCH)) if fused else plain_weight(values)
    layer = Linear(weight, bias, TORCH)
    normed = functional.rms_norm(x, (4,), norm.weight, norm.eps) @ values.T + bias
    torch.testing.assert_close(layer.after_norm(x, norm), normed)
    gate = normed[:, :3]
    gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(layer.gated(x, norm, activation), gate * normed[:, 3:])
    residual = torch.ones(3, 6)
    layer.add_to(residual, x)
    torch.testing.assert_close(residual, 1 + x @ values.T + bias)

from typing import Any

import torch
from torch.nn import functional

from services.worker.kernels.registry import Facts, bind
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp


def test_gates_the_first_half_of_the_fused_projection(plain_weight: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 7, 5, generator=generator)
    down = torch.randn(5, 7, generator=generator)
    x = torch.randn(4, 5, generator=generator)
    mlp = GatedMlp(
        Linear(plain_weight(torch.cat((gate, up)))), Linear(plain_weight(down)), bind(("torch",), Facts("cpu"))
    )
    torch.testing.assert_close(mlp(x), (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)

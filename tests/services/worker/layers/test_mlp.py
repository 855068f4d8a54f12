from typing import Any

import torch
from torch.nn import functional

from services.worker.kernels.registry import Facts, bind
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp
from services.worker.quant.contract import Norm


def test_gates_the_first_half_of_the_fused_projection_and_adds_to_the_stream(plain_weight: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 7, 5, generator=generator)
    down = torch.randn(5, 7, generator=generator)
    x = torch.randn(4, 5, generator=generator)
    bindings = bind(("torch",), Facts("cpu"))
    mlp = GatedMlp(
        Linear(plain_weight(torch.cat((gate, up))), None, bindings), Linear(plain_weight(down), None, bindings)
    )
    normed = functional.rms_norm(x, (5,), torch.full((5,), 2.0), 1e-5)
    wanted = x + (functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    mlp(x, Norm(torch.full((5,), 2.0), 1e-5))
    torch.testing.assert_close(x, wanted)

from typing import Any

import pytest
import torch
from torch.nn import functional

from services.worker.kernels.ops.silu_quantize_groups import silu_quantize_groups
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMlp
from services.worker.quant.coded import Making
from services.worker.quant.contract import Norm
from services.worker.quant.fp8_block import FORMAT
from services.worker.quant.sharded import SummedWeight
from tests.services.worker.quant.loading import as_if_by


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


@pytest.mark.parametrize("ranks", [False, True])
def test_gate_and_quantization_are_one_kernel_where_a_provider_has_it(ranks: bool) -> None:
    """Also through the share of a rank."""
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(512, 128, generator=generator) / 11, torch.randn(128, 256, generator=generator) / 16
    results, called = [], []

    def counted(*arguments: Any) -> Any:
        called.append(arguments)
        return silu_quantize_groups.meaning(*arguments)

    for provider in ("torch", "aiter"):
        bindings = as_if_by(provider, "silu_quantize_groups")
        bindings._chosen["silu_quantize_groups"] = counted
        making = Making(torch.float32, torch.device("cpu"), bindings)
        weights = [FORMAT.weight(FORMAT.encode(m), m.shape[1], None, making) for m in (up, down)]
        second = SummedWeight(weights[1], bindings) if ranks else weights[1]
        mlp = GatedMlp(Linear(weights[0], None, bindings), Linear(second, None, bindings))
        for normed in (False, True):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
            if normed:
                mlp.add_to(x, x.clone())
            else:
                mlp(x, Norm(torch.ones(128), 1e-5))
            results.append(x)
    assert len(called) == 2, "only of the second, in both ways to call it"
    for got, wanted in zip(results[2:], results[:2], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)

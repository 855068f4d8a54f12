import pytest
import torch
from torch.nn import functional

from services.worker.kernels.registry import Facts, bind
from services.worker.layers.moe import MoeMlp, Router
from services.worker.models.spec import MoeSpec
from services.worker.quant.contract import Norm
from services.worker.quant.experts import DenseExperts

BINDINGS = bind(("torch",), Facts("cpu"))


@pytest.mark.parametrize("renormalize", [True, False])
def test_adds_what_the_routed_experts_say(renormalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(5, 6, generator=generator)
    gate_up = torch.randn(5, 14, 6, generator=generator)
    down = torch.randn(5, 6, 7, generator=generator)
    norm = torch.rand(6, generator=generator) + 0.5
    x = torch.randn(4, 6, generator=generator)
    experts = DenseExperts(gate_up, down, BINDINGS)
    mlp = MoeMlp(Router(router), experts, MoeSpec(5, 2, 7, renormalize), BINDINGS)
    normed = functional.rms_norm(x, (6,), norm, 1e-6)
    shares = (normed @ router.T).softmax(-1)
    wanted = x.clone()
    for t in range(4):
        chosen = shares[t].topk(2)
        weights = chosen.values / chosen.values.sum() if renormalize else chosen.values
        for weight, e in zip(weights, chosen.indices.tolist(), strict=True):
            gate, up = (gate_up[e] @ normed[t]).chunk(2)
            wanted[t] += weight * (down[e] @ (functional.silu(gate) * up))
    mlp(x, Norm(norm, 1e-6))
    torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)

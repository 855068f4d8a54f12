from dataclasses import replace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.kernels.registry import Facts, bind
from services.worker.quant.experts import DenseExpertFormat
from services.worker.quant.registry import choose_policy

BINDINGS = bind(("torch",), Facts("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_what_is_stored(make_stored: Any, dtype: torch.dtype) -> None:
    gate_up = [(make_stored("F16", 7, 32), make_stored("Q8_0", 7, 32)) for _ in range(3)]
    down = [make_stored("F32", 32, 7) for _ in range(3)]
    form = DenseExpertFormat(dtype, torch.device("cpu"), BINDINGS)
    assert form.refuses(gate_up, down) is None
    experts = form.make(gate_up, down)
    assert (experts.num_experts, experts.format_name) == (3, "none")
    assert experts.num_bytes == 3 * 3 * 7 * 32 * dtype.itemsize
    for e, ((gate, up), out) in enumerate(zip(gate_up, down, strict=True)):
        assert torch.equal(experts.gate_up[e], torch.cat((gate.dense(dtype), up.dense(dtype))))  # type: ignore[attr-defined]
        assert torch.equal(experts.down[e], out.dense(dtype))  # type: ignore[attr-defined]


def test_policies_have_a_form_for_experts(make_stored: Any) -> None:
    gate_up = [(make_stored("F32", 4, 32), make_stored("F32", 4, 32)) for _ in range(2)]
    down = [make_stored("F32", 32, 4) for _ in range(2)]
    for dtype in ("auto", "float32", "bfloat16"):
        policy = choose_policy(dtype)
        experts = policy.make_experts(gate_up, down)
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to(policy.activation)
        residual = torch.zeros_like(x)
        experts.add_to(residual, x, torch.ones(3, 1), torch.tensor([[0], [1], [1]], dtype=torch.int32))
        gate, up, out = (part.dense(policy.activation) for part in (*gate_up[1], down[1]))
        wanted = (torch.nn.functional.silu(x[2] @ gate.T) * (x[2] @ up.T)) @ out.T
        torch.testing.assert_close(residual[2], wanted, rtol=2e-2, atol=2e-2)


def test_no_format_is_an_error_that_names_the_tensor(make_stored: Any) -> None:
    policy = replace(choose_policy("float32"), experts=())
    down = [make_stored("F32", 32, 4)]
    with pytest.raises(ConfigError, match=r"no weight format for F32\.weight of memory"):
        policy.make_experts([(make_stored("F32", 4, 32), make_stored("F32", 4, 32))], down)

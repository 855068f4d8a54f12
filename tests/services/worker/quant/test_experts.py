from dataclasses import replace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.packing.weight_tiles import untile_weight
from services.worker.kernels.registry import Binding, Bindings, Facts, all_ops, bind
from services.worker.quant.experts import DenseExpertFormat, TiledExpertFormat
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_the_dense_stacks(make_stored: Any, dtype: torch.dtype) -> None:
    gate_up = [(make_stored("F16", 32, 64), make_stored("Q8_0", 32, 64)) for _ in range(3)]
    down = [make_stored("F32", 64, 32) for _ in range(3)]
    form = TiledExpertFormat(dtype, torch.device("cpu"), BINDINGS)
    assert form.refuses(gate_up, down) is None
    experts: Any = form.make(gate_up, down)
    dense: Any = DenseExpertFormat(dtype, torch.device("cpu"), BINDINGS).make(gate_up, down)
    assert (experts.num_experts, experts.format_name, experts.num_bytes) == (3, "tiles", dense.num_bytes)
    assert torch.equal(untile_weight(experts.gate_up), dense.gate_up)
    assert torch.equal(untile_weight(experts.down), dense.down)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights, chosen = torch.rand(5, 2), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]], dtype=torch.int32)
    got, wanted = torch.zeros_like(x), torch.zeros_like(x)
    experts.add_to(got, x, weights, chosen)
    dense.add_to(wanted, x, weights, chosen)
    assert torch.equal(got, wanted) and got.any()


def test_tiles_only_for_a_provider_that_reads_them(make_stored: Any) -> None:
    small = [(make_stored("F32", 8, 32), make_stored("F32", 8, 32))], [make_stored("F32", 32, 8)]
    fitting = [(make_stored("F32", 32, 32), make_stored("F32", 32, 32))], [make_stored("F32", 32, 32)]
    rows = [Binding(name, "aiter" if name == "moe_tiled" else "torch", "") for name in all_ops()]
    reading = Bindings(rows, {name: op.meaning for name, op in all_ops().items()})
    assert reading(moe_tiled) is moe_tiled.meaning
    policy = choose_policy("bfloat16", torch.device("cpu"), reading)
    assert policy.make_experts(*fitting).format_name == "tiles"
    assert policy.make_experts(*small).format_name == "none", "8 rows are no tile"
    assert choose_policy("bfloat16").make_experts(*fitting).format_name == "none"

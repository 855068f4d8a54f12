import pytest
import torch

from services.worker.quant.coded import Codes, Making
from services.worker.quant.contract import ExpertBiases
from services.worker.quant.mxfp4 import FORMAT
from tests.services.worker.quant.loading import BINDINGS, as_if_by

FP4 = as_if_by("aiter", "mxfp4_linear", "moe_mxfp4")
CPU = torch.device("cpu")
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))


def test_activations_are_rounded_only_where_fp4_is_multiplied_by_fp4() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) / 16
    codes = FORMAT.encode(matrix)
    wide = X @ FORMAT.decode(codes).T
    ours, theirs = (FORMAT.weight(codes, 256, None, Making(torch.float32, CPU, b)) for b in (BINDINGS, FP4))
    torch.testing.assert_close(ours.linear(X), wide, rtol=1e-5, atol=1e-5)
    far = float((theirs.linear(X, torch.ones(64)) - 1 - wide).norm() / wide.norm())
    assert 0.03 < far < 0.2
    assert torch.equal(theirs.dequantize(), ours.dequantize())


def test_sizes_that_fp4_products_do_not_take_are_widened() -> None:
    codes = FORMAT.encode(torch.randn(40, 96))
    weight = FORMAT.weight(codes, 96, None, Making(torch.float32, CPU, FP4))
    torch.testing.assert_close(weight.linear(X[:, :96]), X[:, :96] @ FORMAT.decode(codes).T, rtol=1e-5, atol=1e-5)


def stacked(experts: int, rows: int, columns: int) -> Codes:
    each = [FORMAT.encode(torch.randn(rows, columns) / columns**0.5) for _ in range(experts)]
    return Codes(torch.stack([c.values for c in each]), torch.stack([c.scales for c in each]))


def test_experts_with_and_without_biases() -> None:
    up, down = stacked(3, 512, 256), stacked(3, 256, 256)
    routing = torch.ones(5, 1), torch.tensor([[0], [1], [2], [0], [1]], dtype=torch.int32)
    plain, fp4 = (FORMAT.experts(up, down, None, Making(torch.float32, CPU, b)) for b in (BINDINGS, FP4))
    results = []
    for experts in (plain, fp4):
        residual = torch.zeros(5, 256)
        experts.add_to(residual, X, *routing)
        results.append(residual)
    assert 0.01 < float((results[0] - results[1]).norm() / results[0].norm()) < 0.4
    assert FORMAT.refuses_experts(256, 256, ExpertBiases(torch.ones(3, 512), torch.ones(3, 256))) is None
    biased = FORMAT.experts(
        up, down, ExpertBiases(torch.ones(3, 512), torch.ones(3, 256)), Making(torch.float32, CPU, FP4)
    )
    residual = torch.zeros(5, 256)
    biased.add_to(residual, X, *routing)
    assert biased.num_experts == 3 and not torch.allclose(residual, results[0])
    assert "no multiples of 32" in str(FORMAT.refuses_experts(256, 48, None))


@pytest.mark.parametrize("biased", [False, True])
def test_a_provider_that_gates_has_gate_and_up_rows_in_turn(biased: bool) -> None:
    up, down = stacked(3, 128, 96), stacked(3, 96, 64)
    biases = ExpertBiases(torch.randn(3, 128), torch.randn(3, 96)) if biased else None
    routing = torch.ones(5, 1), torch.tensor([[0], [1], [2], [0], [1]], dtype=torch.int32)
    results = []
    for bindings in (BINDINGS, as_if_by("aiter", "moe_mxfp4_paired")):
        experts = FORMAT.experts(up, down, biases, Making(torch.float32, CPU, bindings))
        results.append(torch.zeros(5, 96))
        experts.add_to(results[-1], X[:, :96], *routing)
    assert results[0].abs().max() > 0.1 and torch.equal(*results)
    assert not torch.equal(up.values, experts.stacks[0]) and torch.equal(down.values, experts.stacks[3])

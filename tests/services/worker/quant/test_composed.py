from collections.abc import Callable
from typing import Any

import torch

from services.worker.quant.composed import BySizeFormat, BySizeWeight, TiedWeight
from services.worker.quant.int4 import Int4Format
from services.worker.quant.none import DenseFormat, DenseWeight

DENSE = DenseFormat(torch.float32, torch.float32, torch.device("cpu"))


def test_the_number_of_rows_chooses() -> None:
    few, many = DenseWeight(torch.ones(2, 3)), DenseWeight(torch.full((2, 3), 2.0))
    weight = BySizeWeight(few, many, 4)
    assert weight.linear(torch.ones(3, 3)).unique().tolist() == [3.0]
    assert weight.linear(torch.ones(4, 3), torch.ones(2)).unique().tolist() == [7.0]
    assert weight.num_bytes == 48
    assert weight.dequantize().unique().tolist() == [2.0]
    assert weight.embed(torch.tensor([1])).tolist() == [[2.0, 2.0, 2.0]]


def test_by_size_needs_both(make_stored: Callable[..., Any]) -> None:
    by_size = BySizeFormat(Int4Format(), DENSE, 9)
    assert by_size.name == "int4+none"
    assert by_size.refuses([make_stored("Q8_0", 16, 64)]) == "Q8_0.weight is stored as Q8_0, not in four bits"
    part = make_stored("Q4_0", 16, 64)
    assert by_size.refuses([part]) is None
    weight = by_size.make([part])
    assert weight.format_name == "int4+none"
    x = torch.randn(12, 64)
    few, many = weight.linear(x[:8]), weight.linear(x)
    assert torch.equal(many, x @ part.dense(torch.float32).T)
    assert not torch.equal(few, many[:8])
    torch.testing.assert_close(few, many[:8], rtol=0.02, atol=0.1)


def test_unavailable_when_one_of_the_two_is(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert BySizeFormat(Int4Format(), DENSE, 9).unavailable() is not None
    assert BySizeFormat(DENSE, DENSE, 9).unavailable() is None


def test_tied() -> None:
    table, head = DenseWeight(torch.ones(4, 3)), DenseWeight(torch.full((4, 3), 2.0))
    weight = TiedWeight(table, head)
    assert weight.embed(torch.tensor([2])).tolist() == [[1.0, 1.0, 1.0]]
    assert weight.linear(torch.ones(1, 3)).tolist() == [[6.0] * 4]
    assert torch.equal(weight.dequantize(), head.values)
    assert weight.num_bytes == 96

from collections.abc import Callable
from typing import Any

import torch

from services.worker.quant.none import DenseFormat, DenseWeight, fuse

CPU = torch.device("cpu")


def test_exact(make_stored: Callable[..., Any]) -> None:
    parts = [make_stored("F32", 3, 32), make_stored("Q4_1", 5, 32)]
    weight = DenseFormat(torch.float32, torch.float32, CPU).make(parts)
    stored = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(weight.dequantize(), stored)
    assert (weight.out_features, weight.in_features, weight.num_bytes) == (8, 32, 1024)
    x, bias = torch.randn(4, 32), torch.randn(8)
    torch.testing.assert_close(weight.linear(x, bias), x @ stored.T + bias)
    assert torch.equal(weight.embed(torch.tensor([7, 0], dtype=torch.int32)), stored[[7, 0]])
    assert DenseFormat(torch.float32, torch.float32, CPU).refuses(parts) is None


def test_weights_narrower_than_activations(make_stored: Callable[..., Any]) -> None:
    part = make_stored("F32", 8, 32)
    weight = DenseFormat(torch.bfloat16, torch.float32, CPU).make([part])
    rounded = part.dense(torch.bfloat16).float()
    assert torch.equal(weight.dequantize(), rounded)
    rows = weight.embed(torch.tensor([1]))
    assert rows.dtype == torch.float32 and torch.equal(rows, rounded[[1]])
    x, bias = torch.randn(4, 32), torch.randn(8)
    y = weight.linear(x, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x @ rounded.T + bias, rtol=2e-2, atol=5e-2)


def test_dequantize_is_a_copy() -> None:
    values = torch.ones(2, 2)
    DenseWeight(values).dequantize().zero_()
    assert torch.equal(values, torch.ones(2, 2))


def test_fuse_keeps_the_order(make_stored: Callable[..., Any]) -> None:
    parts = [make_stored("F32", 2, 32), make_stored("F16", 1, 32), make_stored("F32", 3, 32)]
    assert torch.equal(fuse(parts, torch.float32), torch.cat([part.dense(torch.float32) for part in parts]))

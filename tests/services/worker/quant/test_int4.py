from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.quant.int4 import MIDDLE, READERS, Int4Format

STORAGES = ("Q4_0", "Q4_1", "Q4_K")
BF16_STEP = 2.0**-8


@pytest.mark.parametrize("storage", STORAGES)
def test_readers_give_the_stored_matrix(storage: str, make_stored: Callable[..., Any]) -> None:
    part = make_stored(storage, 6, 512)
    numbers, scales, offsets = READERS[storage](part.blocks())
    assert (numbers.shape, scales.shape, offsets.shape) == ((6, 512), (6, 16), (6, 16))
    assert int(numbers.max()) == 15
    steps = (numbers.float() - MIDDLE).view(6, 16, 32)
    values = (steps * scales[..., None] + offsets[..., None]).view(6, 512)
    torch.testing.assert_close(values, part.dense(torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
def test_linear(storage: str, num_rows: int, make_stored: Callable[..., Any]) -> None:
    weight = Int4Format().make([make_stored(storage, 48, 512), make_stored(storage, 16, 512)])
    assert (weight.out_features, weight.in_features) == (64, 512)
    x, bias = torch.randn(num_rows, 512), torch.randn(64)
    y = weight.linear(x, bias)
    assert (y.shape, y.dtype) == ((num_rows, 64), torch.float32)
    expected = x @ weight.dequantize().T + bias
    # x, the products' sum and the result are rounded to bf16: three half steps.
    assert (y - expected).norm() <= 1.5 * BF16_STEP * expected.norm() + 1e-6
    assert torch.equal(weight.linear(x), weight.linear(x, torch.zeros(64)))


@pytest.mark.parametrize("storage", STORAGES)
def test_only_scale_and_offset_are_rounded(storage: str, make_stored: Callable[..., Any]) -> None:
    parts = [make_stored(storage, 32, 256), make_stored(storage, 16, 256)]
    weight = Int4Format().make(parts)
    stored = torch.cat([part.dense(torch.float32) for part in parts])
    # (number - 8) * scale and the offset are each up to twice as large as the weight they add up to.
    assert (weight.dequantize() - stored).norm() <= 2 * BF16_STEP * stored.norm()
    assert weight.num_bytes <= stored.numel() * 0.65
    assert torch.equal(weight.embed(torch.tensor([40, 3])), weight.dequantize()[[40, 3]])


def test_bf16_activations_stay_bf16(make_stored: Callable[..., Any]) -> None:
    weight = Int4Format().make([make_stored("Q4_1", 32, 64)])
    assert weight.linear(torch.randn(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_refuses_by_name(make_stored: Callable[..., Any]) -> None:
    formats = Int4Format()
    assert formats.refuses([make_stored("Q4_0", 16, 64), make_stored("Q4_1", 16, 64)]) is None
    refused = formats.refuses([make_stored("Q4_0", 16, 64), make_stored("Q8_0", 16, 64)])
    assert refused == "Q8_0.weight is stored as Q8_0, not in four bits"
    assert "24 rows" in str(formats.refuses([make_stored("Q4_0", 24, 64)]))


def test_unavailable_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "slow on this CPU" in str(Int4Format().unavailable())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert Int4Format().unavailable() is None

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.quant.int4 import MIDDLE
from services.worker.quant.int8 import Int8Format, eight_bits, in_planes

BF16_STEP = 2.0**-8


def test_two_planes_are_the_stored_matrix(make_stored: Callable[..., Any]) -> None:
    part = make_stored("Q8_0", 6, 96)
    numbers, scales, offsets = in_planes(*eight_bits(part))
    assert (numbers.shape, scales.shape, offsets.shape) == ((6, 192), (6, 6), (6, 6))
    assert int(numbers.max()) <= 15
    steps = (numbers.float() - MIDDLE).view(6, 6, 32)
    high, low = (steps * scales[..., None] + offsets[..., None]).view(6, 192).chunk(2, dim=1)
    torch.testing.assert_close(high + low, part.dense(torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 20])
def test_linear(num_rows: int, make_stored: Callable[..., Any]) -> None:
    parts = [make_stored("Q8_0", 32, 64), make_stored("Q8_0", 16, 64)]
    weight = Int8Format().make(parts)
    assert (weight.out_features, weight.in_features) == (48, 64)
    stored = torch.cat([part.dense(torch.float32) for part in parts])
    # Rounded to bf16: scales and the values of each plane.
    assert (weight.dequantize() - stored).norm() <= BF16_STEP * stored.norm()
    x, bias = torch.randn(num_rows, 64), torch.randn(48)
    y = weight.linear(x, bias)
    assert (y.shape, y.dtype) == ((num_rows, 48), torch.float32)
    expected = x @ stored.T + bias
    assert (y - expected).norm() <= 2 * BF16_STEP * expected.norm() + 1e-6
    assert weight.linear(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(weight.embed(torch.tensor([40])), weight.dequantize()[[40]])


@pytest.mark.parametrize("storage", ["Q6_K", "Q5_0", "Q5_1"])
def test_types_of_fewer_bits_are_rounded_once_more(storage: str, make_stored: Callable[..., Any]) -> None:
    part = make_stored(storage, 16, 256)
    numbers, scales = eight_bits(part)
    wide = part.dense(torch.float32)
    largest = wide.view(16, 8, 32).abs().amax(-1, keepdim=True)
    found = numbers.float().view(16, 8, 32) * scales[..., None]
    assert ((found - wide.view(16, 8, 32)).abs() <= 0.501 * largest / 127).all()
    assert Int8Format().make([part]).out_features == 16


def test_refuses_by_name(make_stored: Callable[..., Any]) -> None:
    assert Int8Format().refuses([make_stored("Q8_0", 16, 64)]) is None
    refused = Int8Format().refuses([make_stored("Q8_0", 16, 64), make_stored("Q4_0", 16, 64)])
    assert refused == "Q4_0.weight is stored as Q4_0, not in eight bits"
    assert "24 rows" in str(Int8Format().refuses([make_stored("Q8_0", 24, 64)]))


def test_unavailable_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert Int8Format().unavailable() is not None

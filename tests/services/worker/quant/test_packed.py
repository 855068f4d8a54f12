from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.quant.contract import WeightFormat
from services.worker.quant.packed import PackedBf16Format, PackedFp16Format

# Relative error of rounding to the format's mantissa (x too for bf16, where the result is rounded as well).
TOLERANCE = {"bf16-packed": 1.5 * 2.0**-8, "fp16-packed": 2.0**-11}
# On a machine without the needed instructions a format is refused by name; what it computes is tested where it runs.
FORMATS: list[WeightFormat] = [form for form in (PackedBf16Format(), PackedFp16Format()) if form.unavailable() is None]


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 64])
def test_linear(weight_format: WeightFormat, num_rows: int, make_stored: Callable[..., Any]) -> None:
    parts = [make_stored("F32", 40, 96), make_stored("Q8_0", 9, 96)]
    weight = weight_format.make(parts)
    assert (weight.out_features, weight.in_features, weight.num_bytes) == (49, 96, 49 * 96 * 2)
    stored = torch.cat([part.dense(torch.float32) for part in parts])
    x, bias = torch.randn(num_rows, 96), torch.randn(49)
    y = weight.linear(x, bias)
    assert (y.shape, y.dtype) == ((num_rows, 49), torch.float32)
    expected = x @ stored.T + bias
    assert (y - expected).norm() <= TOLERANCE[weight_format.name] * expected.norm()
    assert torch.equal(weight.linear(x), weight.linear(x, torch.zeros(49)))
    assert weight.linear(x.bfloat16(), bias.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda form: form.name)
def test_dequantize_is_the_rounded_matrix(weight_format: WeightFormat, make_stored: Callable[..., Any]) -> None:
    part = make_stored("F32", 33, 70)
    dtype = {"bf16-packed": torch.bfloat16, "fp16-packed": torch.float16}[weight_format.name]
    weight = weight_format.make([part])
    expected = part.dense(dtype).float()
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.embed(torch.tensor([32, 0])), expected[[32, 0]])


def test_fp16_refuses_values_beyond_its_range(make_stored: Callable[..., Any]) -> None:
    assert PackedFp16Format().refuses([make_stored("F32", 4, 32)]) is None
    refused = PackedFp16Format().refuses([make_stored("F32", 4, 32), make_stored("F32", 4, 32, 1e6)])
    assert refused == "F32.weight holds values beyond fp16's range"


def test_unavailable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert PackedFp16Format().unavailable() == "this CPU has no AVX2"
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert PackedBf16Format().unavailable() == "this build of torch has no oneDNN"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert PackedBf16Format().unavailable() is not None

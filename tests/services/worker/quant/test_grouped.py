from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.grouped_linear import grouped_linear
from services.worker.quant.grouped import GroupedFormat


@pytest.mark.parametrize(("storage", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q8_0", 8), ("Q6_K", 8)])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_linear_of_the_stored_matrix(storage: str, bits: int, num_rows: int, make_stored: Callable[..., Any]) -> None:
    parts = [make_stored(storage, 48, 256), make_stored(storage, 8, 256)]
    weight = GroupedFormat(bits, grouped_linear.meaning).make(parts)
    assert (weight.out_features, weight.in_features) == (56, 256)
    stored = torch.cat([part.dense(torch.float32) for part in parts])
    # exact but for Q4_K's scales, of 11 bits, and Q6_K's numbers, which are rounded once more
    rounding = {"Q4_K": 2.0**-10, "Q6_K": 0.01}.get(storage, 1e-6)
    assert (weight.dequantize() - stored).norm() <= rounding * stored.norm()
    assert weight.num_bytes == 64 * 256 * (5 if bits == 4 else 8.5) / 8
    x, bias = torch.randn(num_rows, 256), torch.randn(56)
    torch.testing.assert_close(weight.linear(x, bias), x @ weight.dequantize().T + bias, rtol=1e-4, atol=1e-4)
    assert weight.linear(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(weight.embed(torch.tensor([50])), weight.dequantize()[[50]])


def test_refuses_by_name(make_stored: Callable[..., Any]) -> None:
    part = make_stored("Q8_0", 16, 64)
    assert GroupedFormat(8, grouped_linear.meaning).refuses([part]) is None
    refused = GroupedFormat(4, grouped_linear.meaning).refuses([part])
    assert refused == "Q8_0.weight is stored as Q8_0, not in 4 bits"

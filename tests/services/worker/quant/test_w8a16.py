from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.quant.coded import Making
from services.worker.quant.coded_linears import BlockLinears
from services.worker.quant.w8a16 import FORMAT
from tests.services.worker.quant.loading import BINDINGS


@pytest.mark.parametrize("storage", ["Q8_0", "Q6_K"])
def test_ggufs_blocks_as_they_are(storage: str, make_stored: Callable[..., Any]) -> None:
    part = make_stored(storage, 24, 512)
    weight = BlockLinears(FORMAT, Making(torch.float32, torch.device("cpu"), BINDINGS)).make([part])
    wide = part.dense(torch.float32)
    torch.testing.assert_close(weight.dequantize(), wide, rtol=1e-6, atol=1e-7)
    x, bias = torch.randn(3, 512), torch.randn(24)
    torch.testing.assert_close(weight.linear(x, bias), x @ wide.T + bias, rtol=1e-5, atol=1e-4)
    assert weight.num_bytes == 24 * 512 * (8.5 if storage == "Q8_0" else 10) / 8


def test_no_experts() -> None:
    assert FORMAT.refuses_experts(128, 128, None) is not None

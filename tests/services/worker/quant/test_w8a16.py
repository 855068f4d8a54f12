from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.norm_narrow_linear import form_of
from services.worker.quant.coded import Codes, Making
from services.worker.quant.coded_linears import BlockLinears
from services.worker.quant.forms import CodedWeight
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


def test_one_scale_for_a_row_is_not_the_form_whose_activations_are_rounded() -> None:
    codes = Codes(torch.randint(-127, 128, (24, 96), dtype=torch.int8), torch.rand(24, 1).half())
    weight = FORMAT.weight(codes, 96, None, Making(torch.float32, torch.device("cpu"), BINDINGS))
    assert isinstance(weight, CodedWeight) and weight._product.stored is not None
    values, scales, zeros = weight._product.stored
    assert form_of(values, scales) == "int8" and scales.shape == (24, 3) and zeros is None
    assert torch.equal(weight.dequantize(), FORMAT.decode(codes))


def test_no_experts() -> None:
    assert FORMAT.refuses_experts(128, 128, None) is not None

"""What is fused for few rows is apart for many, with x rounded where the weight's form says so."""

import pytest
import torch

from services.worker.kernels.impl.triton import _narrow_fused
from services.worker.kernels.impl.triton._narrow_fused import narrow_of, suits
from services.worker.kernels.impl.triton._narrow_plan import FEW, NORMED
from services.worker.kernels.ops.norm_narrow_linear import narrowed
from services.worker.kernels.ops.norm_quantize_rows import norm_quantize_rows
from services.worker.kernels.ops.row_scaled_linear import make_operands, row_scaled_linear
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from tests.services.worker.kernels.impl.triton.narrow import weight_of


@pytest.mark.parametrize(("rows", "activation"), [(FEW + 3, ""), (FEW + 3, "silu"), (NORMED + 1, "silu")])
def test_many_rows_are_rounded(device: torch.device, rows: int, activation: str) -> None:
    narrow, _ = weight_of("rows", 24, 64, device)
    x, _, bias = make_operands(rows, 64, 24)
    norm = torch.linspace(0.5, 1.5, 64)
    got = _narrow_fused.after_norm(x.to(device), (norm.to(device), 1e-5), narrow, bias.to(device), activation)
    entered = norm_quantize_rows.meaning(x, norm, 1e-5, narrow.weight.dtype)
    wanted = row_scaled_linear.meaning(*entered, narrow.weight.cpu(), narrow.scales.cpu(), bias, torch.float32)
    wanted = silu_and_mul.meaning(wanted) if activation else wanted
    # a number between two of 8 bits may go to either, and a unit for them keep 14 bits of a sum
    assert ((got.cpu() - wanted).abs() > 2e-3).float().mean() < 0.02
    torch.testing.assert_close(got.cpu(), wanted, rtol=2e-2, atol=2e-2)


def test_what_no_kernel_takes() -> None:
    dense = torch.ones(4, 48)
    numbers, scales, _ = narrowed(torch.ones(4, 64), "mxfp4")
    assert suits(narrow_of(numbers, scales, None), torch.ones(1, 64))
    assert not suits(narrow_of(numbers, scales, None), torch.ones(2, 64)), "fp32 beside e2m1"
    assert suits(narrow_of(numbers, scales, None), torch.ones(2, 64, dtype=torch.float16))
    odd = narrow_of(torch.zeros(4, 24, dtype=torch.uint8), torch.ones(4, 2), None)
    assert odd.group == 24 and not suits(odd, dense)
    assert narrow_of(torch.zeros(4, 48, dtype=torch.int8), torch.ones(4, 3), None).form == "int8"

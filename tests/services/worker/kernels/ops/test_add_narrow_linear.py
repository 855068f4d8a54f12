"""The product is added in place."""

import torch

from services.worker.kernels.ops.add_narrow_linear import add_narrow_linear
from services.worker.kernels.ops.norm_narrow_linear import widened


def test_is_the_formula() -> None:
    for case in add_narrow_linear.cases:
        residual, x, weight, scales, zeros, bias = case.make(torch.float32)
        product = x.double() @ widened(weight, scales, zeros).double().T
        wanted = residual.double() + product + (0.0 if bias is None else bias.double())
        assert add_narrow_linear.meaning(residual, x, weight, scales, zeros, bias) is None
        torch.testing.assert_close(residual.double(), wanted, rtol=1e-4, atol=1e-4)

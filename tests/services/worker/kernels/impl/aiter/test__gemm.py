"""AITER's tuned product: none for no tokens."""

import torch

from services.worker.kernels.impl.aiter._gemm import product
from tests.services.worker.kernels.impl.aiter.fake import Fake


def test_products(fake: Fake) -> None:
    host = fake(exact=True)
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    torch.testing.assert_close(product(x, weight, bias), x @ weight.T + bias)
    assert product(x[:0], weight, None).shape == (0, 5) and host.calls == ["mm"]

"""The router's product of rows."""

import pytest
import torch

from services.worker.kernels.impl.triton import _route_rows


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(70, 20, 72), (5, 130, 64)])
def test_is_the_product_in_fp32_whatever_does_not_divide(
    tokens: int, experts: int, hidden: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    normed = torch.randn(tokens, hidden, generator=generator).half()
    router = torch.randn(experts, hidden, generator=generator).half()
    bias = torch.randn(experts, generator=generator).half()
    wanted = normed.double() @ router.double().T + bias.double()
    got = _route_rows.launch(normed.to(device), router.to(device), bias.to(device))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-4, atol=1e-4)

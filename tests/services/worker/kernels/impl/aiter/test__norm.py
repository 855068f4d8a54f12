"""AITER's norm: which widths it is used for, and that strided rows are taken as they are."""

import torch

from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed, refuses_norm
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.aiter.fake import Fake


def test_widths(fake: Fake) -> None:
    fake()

    def refusal(width: int) -> str | None:
        return refuses_norm(Facts("cuda", "gfx942", torch.bfloat16, {"hidden_size": width}), RMS_NORM)

    assert refusal(4096) is None and refusal(8192) is None
    for width in (16384, 100):
        assert refusal(width) == f"norms rows of multiples of 8 up to 8192, not of {width}"
    assert refuses_norm(Facts("cuda", "gfx942", torch.bfloat16), RMS_NORM) is None, "a listing knows no widths"


def test_rows_of_more_dimensions_and_none(fake: Fake) -> None:
    host = fake(exact=True)
    weight = torch.rand(16)
    x = torch.randn(3, 5, 32)[..., :16]
    torch.testing.assert_close(normed(x, weight, 1e-5), rms_norm.meaning(x, weight, 1e-5))
    assert host.given[0]["input"].shape == (15, 16)
    assert normed(x[:0], weight, 1e-5).shape == (0, 5, 16) and len(host.calls) == 1

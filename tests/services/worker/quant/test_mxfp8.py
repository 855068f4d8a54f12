import pytest
import torch

from services.worker.quant import mxfp8
from services.worker.quant.coded import Making
from services.worker.quant.mxfp8 import FORMAT
from tests.services.worker.quant.loading import BINDINGS


def test_gfx942s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes kept, and the next power of two."""
    making = Making(torch.float32, torch.device("cpu"), BINDINGS)
    codes = FORMAT.encode(torch.randn(32, 96, generator=torch.Generator().manual_seed(0)))
    ours = FORMAT.weight(codes, 96, None, making)
    monkeypatch.setattr(mxfp8, "native_fp8", lambda: torch.float8_e4m3fnuz)
    theirs = FORMAT.weight(codes, 96, None, making)
    assert theirs._product.values.dtype == torch.float8_e4m3fnuz  # type: ignore[attr-defined]
    assert torch.equal(theirs.dequantize(), ours.dequantize())
    x = torch.randn(3, 96)
    torch.testing.assert_close(theirs.linear(x), ours.linear(x), rtol=0.05, atol=0.2)

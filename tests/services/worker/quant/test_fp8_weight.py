import pytest
import torch

from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.quant import fp8
from services.worker.quant.coded import Codes, Making
from services.worker.quant.forms import CodedWeight
from services.worker.quant.fp8_weight import FORMAT
from services.worker.quant.scheme import BLOCK, ROW, TENSOR, Numbers, Scheme
from tests.services.worker.quant.loading import BINDINGS, as_if_by

CODES = Codes(*quantized(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), torch.float8_e4m3fn))
MAKING = Making(torch.float32, torch.device("cpu"), BINDINGS)


def test_takes_weights_alone() -> None:
    assert all(FORMAT.takes(Scheme("torchao", Numbers("fp8", per))) for per in (TENSOR, ROW))
    assert not FORMAT.takes(Scheme("torchao", Numbers("fp8", BLOCK, 128)))
    assert not FORMAT.takes(Scheme("torchao", Numbers("fp8", ROW), Numbers("fp8", ROW)))


@pytest.mark.parametrize("rows", [1, 70])
def test_activations_are_never_rounded(rows: int) -> None:
    """Also where a provider has the fused ops, which round those of many rows."""
    making = MAKING._replace(bindings=as_if_by("triton", "norm_narrow_linear", "add_narrow_linear"))
    weight, x = FORMAT.weight(CODES, 128, None, making), torch.randn(rows, 128)
    assert weight.fused is None
    torch.testing.assert_close(weight.linear(x, torch.ones(64)), x @ FORMAT.decode(CODES).T + 1, rtol=1e-5, atol=1e-4)


def test_gfx942s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "native_fp8", lambda: torch.float8_e4m3fnuz)
    weight = FORMAT.weight(CODES, 128, None, MAKING)
    assert isinstance(weight, CodedWeight) and weight._product.values.dtype == torch.float8_e4m3fnuz  # type: ignore[attr-defined]
    assert torch.equal(weight.dequantize(), FORMAT.decode(CODES))


def test_no_experts() -> None:
    assert FORMAT.refuses_experts(128, 128, None) is not None

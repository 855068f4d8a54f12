import pytest
import torch

from services.worker.kernels.packing import fnuz
from services.worker.quant import fp8
from services.worker.quant.coded import Codes, Making
from services.worker.quant.fp8 import FORMAT
from services.worker.quant.scheme import ROW, TENSOR, Numbers, Scheme
from tests.services.worker.quant.loading import BINDINGS, as_if_by

MATRIX = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) / 11
X = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
BY_TENSOR = Scheme("fp8", Numbers("fp8", TENSOR), Numbers("fp8", TENSOR))
MAKING = Making(torch.float32, torch.device("cpu"), BINDINGS)


def one_scale(matrix: torch.Tensor, scale: float) -> Codes:
    return Codes((matrix / scale).to(torch.float8_e4m3fn), torch.tensor([scale]))


def test_parts_of_one_scale_keep_it_and_others_get_one_for_each_row() -> None:
    same = FORMAT.join([one_scale(MATRIX, 0.01), one_scale(MATRIX, 0.01)])
    assert same.scales.tolist() == pytest.approx([0.01])
    unlike = FORMAT.join(
        [
            one_scale(MATRIX, 0.01)._replace(input_scale=torch.tensor([2.0])),
            one_scale(MATRIX, 0.02)._replace(input_scale=torch.tensor([3.0])),
        ]
    )
    assert unlike.scales.shape == (128, 1) and unlike.input_scale is not None and unlike.input_scale.tolist() == [3.0]
    both = torch.cat([FORMAT.decode(one_scale(MATRIX, 0.01)), FORMAT.decode(one_scale(MATRIX, 0.02))])
    assert torch.equal(FORMAT.decode(unlike), both)
    for codes in (same, unlike):
        weight = FORMAT.weight(codes, 128, BY_TENSOR, MAKING)
        torch.testing.assert_close(weight.dequantize(), FORMAT.decode(codes))
        y = weight.linear(X, torch.ones(128))
        assert float((y - 1 - X @ FORMAT.decode(codes).T).norm() / y.norm()) < 0.05


def test_activations_of_another_kind_are_not_taken() -> None:
    weight = Numbers("fp8", ROW)
    for activation in (None, Numbers("int8", ROW), Numbers("fp8", ROW, dynamic=False), Numbers("fp8", "group", 64)):
        assert not FORMAT.takes(Scheme("quark", weight, activation))
    assert FORMAT.takes(Scheme("quark", weight, Numbers("fp8", ROW)))


def test_tiles_where_they_are_read() -> None:
    making = MAKING._replace(bindings=as_if_by("aiter", "row_scaled_linear"))
    codes = FORMAT.encode(MATRIX)
    tiled, plain = (FORMAT.weight(codes, 128, None, m) for m in (making, MAKING))
    assert tiled._product.values.dim() == 4 and plain._product.values.dim() == 2  # type: ignore[attr-defined]
    torch.testing.assert_close(tiled.linear(X), plain.linear(X))
    assert torch.equal(tiled.dequantize(), plain.dequantize())


def test_gfx942s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, bytes kept and scales doubled; also a scale of activations from the checkpoint."""
    codes = FORMAT.encode(MATRIX)._replace(input_scale=torch.tensor([0.02]))
    scheme = Scheme("fp8", Numbers("fp8", TENSOR), Numbers("fp8", TENSOR, dynamic=False))
    ours = FORMAT.weight(codes, 128, scheme, MAKING)
    monkeypatch.setattr(fp8, "native_fp8", lambda: torch.float8_e4m3fnuz)
    theirs = FORMAT.weight(codes, 128, scheme, MAKING)
    assert theirs._product.values.dtype == torch.float8_e4m3fnuz  # type: ignore[attr-defined]
    assert torch.equal(theirs.dequantize(), ours.dequantize())
    torch.testing.assert_close(theirs.linear(X), ours.linear(X), rtol=0.02, atol=0.02)
    assert fnuz.native_fp8() == torch.float8_e4m3fn
